"""COCO files: each image with its annotations as they came, in little memory, and nothing lost."""

import base64
import io
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image

import shardset
from pipelines.check.verify import verify
from pipelines.report import page
from pipelines.sources import coco, open_source
from pipelines.sources.formats import json_arrays
from shardset.errors import ConfigError, SourceError
from shardset.storage.open import open_storage
from tests.makers.built import built, config_of, verified
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
    stream = shardset.Stream(
        str(tmp_path / "out"),
        "val",
        batch_size=2,
        seed=1,
        image=shardset.ImageSpec(size=8, crop=shardset.Resize()),
        targets={"boxes": shardset.Boxes("json", max_boxes=2)},
    )
    [batch] = stream.epoch(0)
    assert {*map(tuple, batch["boxes_class"].tolist())} == {(-1, -1), (2, 0)}
    text = page.render(page.write(str(tmp_path / "out")).data).decode()
    assert "2 boxes are partly outside of the image." in text
    assert "1 class has no box in the decoded images: ox" in text
    renumbered = [replace(one, category_id=one.label) for one in manifest.classes]
    publish(open_storage(str(tmp_path / "out")), replace(manifest, classes=renumbered))
    problems = verify(str(tmp_path / "out"), deep=True).problems
    assert any(
        "its json: category 7 in an annotation, which no class has" in str(one) for one in problems
    )


def test_the_page_shows_the_boxes_on_the_pictures(tmp_path):
    (tmp_path / "raw").mkdir()
    Image.new("RGB", (400, 320)).save(tmp_path / "raw/5.png")
    box = BOX.replace("1,2,\n3.50,4e2", "100,50,200,200") % (5, 7)
    built(config(tmp_path, {"annotations": [box], "images": IMAGES[:1]}, num_shards={"train": 1}))
    [picture] = page.write(str(tmp_path / "out")).data.pictures.values()
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
        ({"images": IMAGES[1:]}, "0 images have the id 5, expected one"),
        ({"images": IMAGES * 2}, "2 images have the id 5, expected one"),
        ({"images": [], "annotations": []}, "no rows, expected one for each image"),
        ({"images": ['{"id": 9}']}, "images: .*field `file_name`"),
        ({"categories": CLASSES[:1]}, "no category 3, which an annotation has: "),
        ({"categories": [*CLASSES, CLASSES[0].replace("cat", "cow")]}, "7 has two names"),
        ({"annotations": ['{"image_id": 5, "category_id": 3}']}, "annotations: .*field `bbox`"),
        ({"annotations": [BOX.replace("3.50", "NaN") % (5, 3)]}, "annotations: .*malformed"),
    ],
)
def test_a_file_that_would_lose_something_is_refused(tmp_path, sections, message):
    with pytest.raises(SourceError, match=message):
        open_source(config(tmp_path, sections)).survey()
    with pytest.raises(ConfigError, match="needs --annotations FILE"):
        open_source(config(tmp_path, annotations={})).survey()


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
