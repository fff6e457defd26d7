"""COCO files: each image with its annotations as they came, in little memory, and nothing lost."""

import base64
import io
import json
import tracemalloc
from dataclasses import replace as replace_fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image

import shardset
from pipelines.check.verify import verify
from pipelines.images.options import ImageOptions
from pipelines.report import set_page
from pipelines.sources import coco, open_source
from pipelines.sources.formats import json_arrays
from shardset.errors import ConfigError, SourceError
from shardset.storage.open import open_storage
from tests.makers.built import built, config_of, inspected, verified
from tests.makers.folders import write_images
from tests.makers.shardset import publish
from tests.makers.stored import samples_of

BOX = '{"image_id":%d,"id":1, "category_id": %d, "bbox": [1,2,\n3.50,4e2]}'
BOXES = [BOX % (5, 7), BOX % (5, 3), BOX % (9, 3)]
IMAGE = '{"id": %d, "file_name": "%d.png"}'
IMAGES = [IMAGE % (number, number) for number in (5, 0, 9)]
CLASSES = ['{"id": 7, "name": "cat"}', '{"id": 3, "name": "dog"}', '{"id": 4, "name": "ox"}']


def config(place, sections=(), split="", **options):
    """Of a build of a COCO file in which annotations come first, with images in `raw`."""
    found = {"annotations": BOXES, "images": IMAGES, "categories": CLASSES, **dict(sections)}
    texts = (f'"{name}" : [{", ".join(each)}]' for name, each in found.items())
    (place / "boxes.json").write_text(f"{{{', '.join(texts)} }}\n")
    annotations = {split: str(place / "boxes.json")}
    options = {"source": "coco", "annotations": annotations, "num_shards": {}, **options}
    return config_of(place / "raw", place / "out", **options)


def stream_of(place, batch_size, split="train", max_boxes=64):
    """A stream in order of the set, with boxes; bad samples are masked."""
    return shardset.Stream(
        str(place / "out"),
        split,
        batch_size=batch_size,
        seed=None,
        image=shardset.ImageSpec(size=8, crop=shardset.Resize()),
        targets={"boxes": shardset.Boxes("json", max_boxes=max_boxes)},
        bad_samples="mask",
    )


def test_annotations_are_stored_as_they_came_with_masks_and_categories(tmp_path, monkeypatch):
    monkeypatch.setattr(coco, "PART_BYTES", 10)
    write_images(tmp_path, [f"raw/val/{number}.png" for number in (5, 0, 9)])
    masks = write_images(tmp_path / "masks", ["val/0.png", "val/5.png"])
    for path in masks.rglob("*.png"):
        Image.open(path).convert("L").save(path)
    built(config(tmp_path, split="val", masks=str(masks)))
    manifest = verified(tmp_path / "out")
    assert [(one.name, one.category_id) for one in manifest.classes] == [
        *(("dog", 3), ("ox", 4), ("cat", 7))
    ]
    assert manifest.provenance.notes == ["2 of 2 samples have no label"]
    assert "its mask.png: not found" in (tmp_path / "out/quarantine.jsonl").read_text()
    samples = samples_of(tmp_path / "out", manifest, "val")
    assert samples["val/5"]["mask.png"] == (masks / "val/5.png").read_bytes()
    json_of = '{"image_id":%d,"file_name":"%d.png","annotations":[%s]}'
    assert {key: fields["json"].decode() for key, fields in samples.items()} == {
        "val/0": json_of % (0, 0, ""),
        "val/5": json_of % (5, 5, ",".join(BOXES[:2])),
    }
    [batch] = stream_of(tmp_path, 2, "val", max_boxes=2).epoch(0)
    assert {*map(tuple, batch["boxes_class"].tolist())} == {(-1, -1), (2, 0)}
    text = set_page.render(set_page.write(str(tmp_path / "out")).data).decode()
    assert "2 boxes are partly outside of the image." in text
    assert "1 class has no box in the decoded images: ox" in text
    renumbered = [replace(one, category_id=one.label) for one in manifest.classes]
    publish(open_storage(str(tmp_path / "out")), replace(manifest, classes=renumbered))
    problems = verify(str(tmp_path / "out"), deep=True).problems
    assert any("its json: category 7, which no class has" in str(one) for one in problems)


def test_the_page_shows_the_boxes_on_the_pictures(tmp_path):
    (tmp_path / "raw").mkdir()
    Image.new("RGB", (400, 320)).save(tmp_path / "raw/5.png")
    box = BOX.replace("1,2,\n3.50,4e2", "100,50,200,200") % (5, 7)
    built(config(tmp_path, {"annotations": [box], "images": IMAGES[:1]}, num_shards={"train": 1}))
    [picture] = set_page.write(str(tmp_path / "out")).data.pictures.values()
    with Image.open(io.BytesIO(base64.b64decode(picture.uri.partition(",")[2]))) as image:
        assert image.size == (256, 205)
        red = np.asarray(image.convert("RGB"))[..., 0].astype(int)
    is_edge = red > 100
    assert is_edge[33, 70:186].all()  # 50 of the image's pixels below its top
    assert is_edge[40:150, 65].all()
    assert not is_edge[40:150, 75:180].any()
    assert not is_edge[:, :60].any()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"images": IMAGES * 2}, "2 images have the id 5, expected one"),
        ({"images": [], "annotations": []}, "no rows, expected one for each image"),
        ({"images": ['{"id": 9}']}, "file_name: path '', expected a file's"),
        ({"images": ['{"file_name": "9.png"}']}, "an image without id or file_name: "),
        ({"images": IMAGES[1:2]}, "no annotation can be used; .*of images that are not listed: 3"),
        ({"categories": CLASSES[2:]}, "no annotation can be used; .*category 3, which no class"),
        ({"categories": [*CLASSES, CLASSES[0].replace("cat", "cow")]}, "7 has two names"),
        (
            {"annotations": [BOX.replace("3.50", "NaN") % (5, 3)]},
            r"left out, not as COCO has them: 1, such as .*\[1, 2, NaN",
        ),
    ],
)
def test_a_file_that_would_lose_something_is_refused(tmp_path, sections, message):
    with pytest.raises(SourceError, match=message):
        open_source(config(tmp_path, sections)).survey()
    with pytest.raises(ConfigError, match="needs --annotations FILE"):
        open_source(config(tmp_path, annotations={})).survey()


def annotation(number, image, category=3, bbox=(1, 2, 3, 4), **more):
    one = {"id": number, "image_id": image, "category_id": category, "bbox": bbox, **more}
    return json.dumps({name: value for name, value in one.items() if value != "no"})


def annotations_of(place, split="train"):
    """The stored annotations by key."""
    return {
        sample.key: json.loads(sample.fields["json"])["annotations"]
        for sample in shardset.open(str(place / "out"), split)
    }


def test_odd_annotations_are_counted_and_the_first_three_named(tmp_path):
    write_images(tmp_path / "raw", ["0.png", "1.png", "c.png", "val/d.png"])
    images = [
        '{"id": 0.0, "file_name": "0.png", "license": NaN}',
        '{"id": "00x", "file_name": "1.png"}',
        '{"id": 2, "file_name": "c.png"}',
        '{"id": 3, "file_name": "c.png"}',
        '{"id": 4, "coco_url": "http://images.cocodataset.org/val/d.png"}',
    ]
    kept = [
        *(annotation(n, "00x", iscrowd=crowd) for n, crowd in enumerate((False, None, 0.0))),
        annotation(3, 0, 3.0),
        annotation(4, 0, "3", area=float("nan")),
        annotation(5, 2, bbox=(1, 2, -3, 4)),
        annotation(6, 2, bbox=()),
        annotation(7, 2, bbox="no", category="no", caption="a cat"),
    ]
    left_out = [
        *(annotation(n, 2, bbox=(1, 2, 3)) for n in range(8, 12)),
        annotation(12, 2, 2**63),
        annotation(13, 2, 99),
        annotation(14, 77),
    ]
    categories = [*CLASSES, f'{{"id": {2**70}, "name": "big"}}']
    sections = {"images": images, "annotations": kept + left_out, "categories": categories}
    built(config(tmp_path, sections, num_shards={"train": 1}))
    manifest = verified(tmp_path / "out")
    notes = "\n".join(manifest.provenance.notes)
    for text in (
        "boxes.json: annotations left out, a bbox of 3 numbers, expected left, top, width, height:"
        ' 4, such as {"id": 8, "image_id": 2, "category_id": 3, "bbox": [1, 2, 3]}; {"id": 9,',
        "annotations left out, not as COCO has them: 1, such as",
        "annotations left out, category 99, which no class has: 1, such as",
        "annotations left out, of images that are not listed: 1, such as",
        "categories left out, not as COCO has them: 1, such as",
        "annotations whose bbox has no area, which Boxes passes over: 1, such as",
        "annotations without a bbox, which Boxes passes over: 2, such as",
    ):
        assert text in notes
    assert '{"id": 11,' not in notes
    found = annotations_of(tmp_path)
    assert sorted(one["id"] for some in found.values() for one in some) == [*range(8)]
    assert [one["id"] for one in found["1"]] == [0, 1, 2]
    assert found["0"][1]["area"] is None
    assert {"0", "1", "val/d"} < found.keys()
    assert len(found) == 5
    [batch] = stream_of(tmp_path, 5).epoch(0)
    assert (batch["boxes_class"] == 0).sum() == 5
    [dog, *others] = inspected(tmp_path / "out")["classes"]
    assert (dog["counts"], [one["counts"] for one in others]) == (
        {"train": 5},
        [{"train": 0}] * 2,
    )
    assert inspected(tmp_path / "out")["boxes_in"] == {"train": 5}


def test_files_that_number_categories_otherwise_give_the_same_classes(tmp_path):
    write_images(tmp_path / "raw", ["a/0.png", "b/0.png", "c/0.png"])
    images = ['{"id": 0, "file_name": "0.png"}']
    first = {"images": images, "annotations": [annotation(0, 0, 3), annotation(1, 0, 7)]}
    other = ['{"id": 3, "name": "cat"}', '{"id": 0, "name": "dog"}', '{"id": 7, "name": "owl"}']
    files = {}
    for split, sections in (
        ("a", first),
        (
            "b",
            first | {"annotations": [annotation(n, 0, n) for n in (0, 3, 7)], "categories": other},
        ),
    ):
        both = config(tmp_path, sections, split)
        files[split] = str((tmp_path / "boxes.json").rename(tmp_path / f"{split}.json"))
    built(replace_fields(both, annotations=files))
    manifest = verified(tmp_path / "out")
    classes = [("dog", 3), ("ox", 4), ("cat", 7), ("owl", 8)]
    assert [(one.name, one.category_id) for one in manifest.classes] == classes
    [stored] = annotations_of(tmp_path, "b").values()
    assert [one["category_id"] for one in stored] == [3, 7, 8]
    renumbered = {"annotations": [annotation(0, 0, 1)], "images": images}
    renumbered["categories"] = ['{"id": 1, "name": "owl"}', '{"id": 3, "name": "cow"}']
    appending = config(tmp_path, renumbered, "c", append="store")
    built(appending)
    manifest = verified(tmp_path / "out")
    assert [(one.name, one.category_id) for one in manifest.classes] == [*classes, ("cow", 9)]
    assert annotations_of(tmp_path, "c")["c/0"][0]["category_id"] == 8


def test_samples_without_annotations_have_no_boxes_in_a_set_of_coco(tmp_path):
    write_images(tmp_path, ["raw/5.png", "more/dog/x.png"])
    built(config(tmp_path, {"annotations": BOXES[:1], "images": IMAGES[:1]}))
    built(config_of(tmp_path / "more", tmp_path / "out", num_shards={"": 1}, append="store"))
    verified(tmp_path / "out")
    [batch] = stream_of(tmp_path, 2, max_boxes=1).epoch(0)
    assert (batch["weight"].tolist(), batch["boxes_class"].tolist()) == ([1, 1], [[2], [-1]])
    assert inspected(tmp_path / "out")["classes"][2]["counts"] == {"train": 1}
    text = set_page.render(set_page.write(str(tmp_path / "out")).data).decode()
    assert "has no sample of" not in text
    assert "Boxes of each class in the decoded images" in text


@pytest.mark.parametrize(
    ("json_", "is_bad"),
    [
        (b'{"annotations":[{"bbox":[1,1,2,2],"category_id":9223372036854775808}]}', True),
        (b'{"annotations":[{"bbox":[1,1,2],"category_id":1}]}', True),
        (b'{"annotations":[{"bbox":[1,1,2,2],"category_id":1}]}', False),
        (b'{"annotations":{"bbox":[[1,1,2]]}}', None),
    ],
)
def test_verify_names_the_boxes_that_the_stream_masks(tmp_path, json_, is_bad):
    """None: JSON of another form, which only a target refuses."""
    with shardset.Writer(str(tmp_path / "out")) as writer:
        writer.write(image=np.zeros((8, 8, 3), np.uint8), json=json_)
    assert next(iter(stream_of(tmp_path, 1)))["weight"] == [float(is_bad is False)]
    problems = verify(str(tmp_path / "out"), deep=True).problems
    assert ["its json: " in str(one) for one in problems] == [True] * bool(is_bad)


def test_absolute_names_need_no_folder_of_their_split(tmp_path):
    write_images(tmp_path, ["raw/val/0.png", "else/1.png"])
    open_storage("memory://coco-names").write("2.png", (tmp_path / "else/1.png").read_bytes())
    names = "0.png", str(tmp_path / "else/1.png"), "memory://coco-names/2.png"
    images = [json.dumps({"id": n, "file_name": name}) for n, name in enumerate(names)]
    built(config(tmp_path, {"images": images, "annotations": [annotation(0, 1)]}, "val"))
    assert verified(tmp_path / "out").splits["val"].num_samples == 3


def scene(place, orientation=1, size=(300, 200)):
    """A bright rectangle of (100, 50) to (220, 150) in the stored pixels of 300 x 200."""
    image = Image.new("RGB", (300, 200))
    image.paste((255, 255, 255), (100, 50, 220, 150))
    exif = image.getexif()
    exif[0x0112] = orientation
    place.parent.mkdir(parents=True, exist_ok=True)
    image.resize(size).save(place, quality=95, exif=exif)


@pytest.mark.parametrize("source", ["coco", "listing", "shardset"])
def test_boxes_fit_their_images_whatever_their_sizes(tmp_path, source):
    box, turned = [100, 50, 120, 100], [50, 100, 100, 120]
    cases = {
        "upright": ((1,), (300, 200), box),
        "turned": ((6,), (300, 200), box),
        "drawn-turned": ((6,), (200, 300), [200 - 150, *turned[1:]]),
        "halved": ((1, (150, 100)), (300, 200), box),
        "doubled": ((6, (600, 400)), (300, 200), box),
        "other-shape": ((1, (150, 150)), (300, 200), box),
    }
    images, rows = [], []
    for number, (name, (stored, (width, height), bbox)) in enumerate(cases.items()):
        scene(tmp_path / f"raw/{name}.jpg", *stored)
        image = {"id": number, "file_name": f"{name}.jpg", "width": width, "height": height}
        images.append(json.dumps(image))
        one = {"bbox": bbox, "category_id": 3}
        rows.append({"path": f"{name}.jpg", "annotations": [one], **image})
    boxes = [annotation(n, n, bbox=bbox) for n, (*_, bbox) in enumerate(cases.values())]
    sections = {"images": images, "annotations": boxes}
    smaller = {"image": ImageOptions(resize_shorter=60), "num_shards": {"": 1}}
    if source == "listing":
        (tmp_path / "raw/l.jsonl").write_text("\n".join(map(json.dumps, rows)))
        listing = tmp_path / "raw/l.jsonl"
        built(config_of(listing, tmp_path / "out", source=source, label_column="", **smaller))
    elif source == "coco":
        built(config(tmp_path, sections, **smaller))
    else:
        (tmp_path / "whole").mkdir()
        built(
            config_of(
                tmp_path / "raw",
                tmp_path / "whole/out",
                source="coco",
                annotations=config(tmp_path, sections).annotations,
            )
        )
        options = {"source": source, "verify": "none", **smaller}
        built(config_of(tmp_path / "whole/out", tmp_path / "out", **options))
    manifest = verified(tmp_path / "out")
    samples = {one.key: one for one in shardset.open(str(tmp_path / "out"), "train")}
    assert samples.keys() == cases.keys() - {"other-shape"}
    for name, sample in samples.items():
        [one] = json.loads(sample.fields["json"])["annotations"]
        bright = sample.image[..., 0] > 127
        rows_, columns = np.nonzero(bright)
        found = [columns.min(), rows_.min(), np.ptp(columns) + 1, np.ptp(rows_) + 1]
        np.testing.assert_allclose(one["bbox"], found, atol=1.1, err_msg=name)
        stored = json.loads(sample.fields["json"])
        assert (stored["height"], stored["width"]) == sample.image.shape[:2]
    if source != "shardset":
        reason = "its width and height in json are of another image: (300, 200) for (150, 150)"
        assert reason in (tmp_path / "out/quarantine.jsonl").read_text()
        notes = "\n".join(manifest.provenance.notes)
        assert "2 images are annotated with width and height before EXIF turns" in notes
        assert "2 images are annotated with another width and height of the same shape" in notes


@pytest.mark.nightly
def test_a_file_of_100_mb_takes_less_than_its_size(tmp_path):
    write_images(tmp_path, ["raw/0.png"])
    long = BOX.replace("[1,", f"[{' ' * 1000}1,")
    numbers = range(20_000)
    sections = {
        "annotations": [long % (number, 3) for number in numbers] * 5,
        "images": [IMAGE % (number, number) for number in numbers],
    }
    source = open_source(config(tmp_path, sections))
    del sections
    tracemalloc.start()
    source.survey()
    assert tracemalloc.get_traced_memory()[1] < 90e6
    tracemalloc.stop()


VALUES = (
    st.text() | st.integers() | st.lists(st.text()) | st.dictionaries(st.text(), st.floats(0, 1))
)


@settings(deadline=None)
@given(
    st.dictionaries(st.text("ab{[:,", max_size=3), VALUES | st.lists(VALUES), max_size=4),
    st.none() | st.integers(0, 2),
    st.data(),
)
def test_elements_are_those_of_the_arrays_and_a_cut_file_is_an_error(values, indent, data):
    text = json.dumps(values, indent=indent, ensure_ascii=False)

    def found(text):
        file = io.BufferedReader(io.BytesIO(text.encode("utf-8", "surrogatepass")))
        return [(name, json.loads(one)) for name, one in json_arrays.elements(file, "x")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_arrays, "PIECE_CHARS", 1)
        patch.setattr(json_arrays, "_MARGIN", 40)
        assert found(text) == [
            (name, one)
            for name, value in values.items()
            for one in (value if isinstance(value, list) else [value])
        ]
    with pytest.raises(SourceError, match="not JSON, or cut off"):
        found(text[: data.draw(st.integers(0, len(text) - 1))])
