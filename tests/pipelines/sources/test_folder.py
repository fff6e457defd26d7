import os
import unicodedata

import pytest
from torchvision.datasets import ImageFolder

from pipelines.build import build
from pipelines.config import BuildConfig
from pipelines.sources import open_source
from pipelines.sources.base import Extent
from pipelines.sources.folder import Folder
from shardset.errors import ShardsetError, SourceError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.storage.open import open_storage
from tests.makers.built import HERE, add
from tests.makers.folders import write_class_folders, write_images
from tests.makers.images import image_bytes
from tests.makers.spools import read


def opened(path, **options) -> Folder:
    return Folder(open_storage(str(path)), **options)


def test_class_folders_give_labels_in_name_order_and_one_split(tmp_path):
    source = opened(write_class_folders(tmp_path, ["dog", "Cat", "émeu"], 2))
    classes = [(info.label, info.name) for info in source.survey().classes]
    assert classes == [*enumerate(("Cat", "dog", "émeu"))]
    names = [f"{name}/00{n}.png" for name in ("Cat", "dog", "émeu") for n in (0, 1)]
    assert [(sample.name, sample.label, sample.split) for sample in read(source)] == [
        (name, number // 2, "train") for number, name in enumerate(names)
    ]


def test_splits_share_the_labels_of_the_union_of_their_classes(tmp_path):
    write_images(tmp_path, ["train/b/1.png", "train/a/1.png", "val/c/1.png", "val/b/1.png"])
    source = opened(tmp_path)
    assert [(s.split, s.key, s.label) for s in read(source)] == [
        ("train", "train/a/1", 0),
        ("train", "train/b/1", 1),
        ("val", "val/b/1", 1),
        ("val", "val/c/1", 2),
    ]
    assert source.survey().splits == {"train", "val"}


@pytest.mark.parametrize("depth", [1, 2])
def test_class_names_that_differ_by_their_unicode_form_are_one_class(tmp_path, depth):
    names = [unicodedata.normalize(form, "café" + "/ガ" * (depth - 1)) for form in ("NFC", "NFD")]
    write_images(tmp_path, [f"train/{names[0]}/1.png", f"val/{names[1]}/1.png", "val/a/b/1.png"])
    source = opened(tmp_path, class_depth=depth)
    assert [info.name for info in source.survey().classes][1:] == [names[0]]
    assert [sample.label for sample in read(source)] == [1, 0, 1]


def test_a_split_without_any_class_of_the_training_split_is_refused(tmp_path):
    write_images(tmp_path, ["train/n01/images/1.png", "train/n02/1.png", "val/images/1.png"])
    message = (
        r"no class of split val \(images\) is one of training \(n01, n02\); .*--source listing"
    )
    with pytest.raises(SourceError, match=message):
        opened(tmp_path).survey()


def test_a_class_folder_without_images_is_noted(tmp_path):
    write_images(tmp_path, ["train/cat/1.png", "val/cat/1.png"])
    for name in ("train/dog", "val/emu/x", ".git/x", "val/cat/y"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "train/dog/.gitkeep").touch()
    assert "no image in 2 class folders: dog, emu" in opened(tmp_path).survey().notes


def test_a_sample_is_called_by_its_path_and_pinned_to_what_the_survey_saw(tmp_path):
    source = opened(write_images(tmp_path, ["cat/n01.tar.1.png"]))
    [sample] = read(source)
    stat = source.input.stat("cat/n01.tar.1.png")
    assert (sample.key, sample.name) == ("cat/n01.tar.1", "cat/n01.tar.1.png")
    assert sample.fields == {"png": Extent(sample.name, stat.generation, 0, stat.num_bytes)}


def test_every_image_extension_counts_in_any_case_and_also_of_an_empty_file(tmp_path):
    extensions = {**FIELD_OF_EXTENSION, "JPEG": "jpg", "Png": "png"}
    (tmp_path / "cat").mkdir()
    for extension in extensions:
        (tmp_path / "cat" / f"{extension}.{extension}").touch()
    samples = read(opened(tmp_path))
    assert {sample.name.rpartition(".")[2]: [*sample.fields] for sample in samples} == {
        extension: [field] for extension, field in extensions.items()
    }


def test_other_files_and_hidden_files_are_counted_in_notes(tmp_path):
    write_images(tmp_path, ["cat/1.png", ".git/2.png", "cat/.3.png", "cat/.thumbs/4.png"])
    for name in ("a.txt", "cat/labels.csv", "cat/deep/er/b.txt", "cat/LICENSE", ".DS_Store"):
        add(tmp_path, name, b"x")
    source = opened(tmp_path)
    assert [sample.name for sample in read(source)] == ["cat/1.png"]
    others, hidden, only = source.survey().notes
    assert (
        others == "skipped 4 non-image files (1 without extension, 1 .csv, 2 .txt), such as a.txt"
    )
    assert hidden == "skipped 4 hidden files"
    assert only.startswith("cat is the only class; cat/labels.csv looks like a table: if it lists")


ADVISED = {
    "photos.zip": (["photos.zip"], "folder", "an archive: unpack it"),
    "mnist": (
        ["mnist/train-images-idx3-ubyte.gz"],
        "hf",
        "/docs/how-to/migrate.md shows how to write",
    ),
    "photos.csv": (["photos.csv"], "folder", "read it by --source listing"),
    "parquet": (["parquet/a.parquet"], "folder", "read by --source hf"),
    "tars": (["tars/a.tar"], "hf", "read by --source webdataset"),
    "pictures": (["pictures/cat/1.png"], "webdataset", "class folders are --source folder"),
    "flat": (["flat/a_1.png"], "folder", "whose names hold the labels: see https://"),
    "yolo": (
        ["yolo/images/train/1.png", "yolo/labels/train/1.txt"],
        "folder",
        "YOLO: boxes are not labels",
    ),
    "coco": (
        ["coco/val2017/1.png", "coco/annotations/instances_val2017.json"],
        "folder",
        "COCO: read by --source coco",
    ),
}


@pytest.mark.parametrize("name", ADVISED)
def test_input_of_another_form_gets_a_sentence_that_names_the_way(tmp_path, name):
    files, source, sentence = ADVISED[name]
    write_images(tmp_path, [file for file in files if file.endswith(".png")])
    for file in files:
        if not file.endswith(".png"):
            add(tmp_path, file, b"")
    config = BuildConfig(source=source, input=str(tmp_path / name), output="unused")
    try:
        said = " ".join(open_source(config).survey().notes)
    except ShardsetError as error:
        said = str(error)
    assert sentence in said


def test_a_name_that_is_no_utf8_is_an_error_that_prints_it(tmp_path):
    write_images(tmp_path, ["cat/1.png"])
    os.rename(tmp_path / "cat" / "1.png", os.fsencode(tmp_path / "cat") + b"/\xff.png")
    with pytest.raises(SourceError, match=r"cat/\\xff\.png: this name is not valid UTF-8; rename"):
        opened(tmp_path).survey()


# --- layouts that are neither


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["1.png", "2.png"], r"found images such as 1\.png; expected images as SPLIT/CLASS/file"),
        (["x/train/cat/1.png"], "below the classes look like splits, such as train; .*name the"),
        (["cat/train/1.png", "dog/test/1.png"], "such as test; .*move the splits above"),
        (["train2017/1.png", "Val2017/1.png"], "class folders look like splits, such as Val2017"),
        ([f"x/d/{name}/a/1.png" for name in ("train", "extra", "dev")], "below .*, such as dev"),
        (["train/1.png", "test/1.png", "extra/1.png"], "class folders .*, such as test"),
    ],
)
def test_another_layout_is_an_error_with_an_example(tmp_path, paths, message):
    with pytest.raises(SourceError, match=message):
        opened(write_images(tmp_path, paths)).survey()


def test_a_folder_that_can_not_name_a_split_ends_the_build(tmp_path):
    raw = write_images(tmp_path / "raw", ["my split/cat/1.png", "train/cat/1.png"])
    config = BuildConfig(source="folder", input=str(raw), output=str(tmp_path / "out"))
    with pytest.raises(
        SourceError, match=r"my split/cat/1\.png: 'my split' can't name a split \(expected"
    ):
        build(config, HERE)


def test_a_folder_without_images_is_an_error_that_says_what_is_there(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SourceError, match="no files there; expected images as"):
            opened(path).survey()
    add(tmp_path, "cat/1.heic", b"x")
    found = r"only 1 non-image file \(1 \.heic\); expected .* \(jpg, jpeg, jpe, jfif"
    with pytest.raises(SourceError, match=found):
        opened(tmp_path).survey()


SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>'
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


@pytest.mark.parametrize(
    ("lost", "content", "kept", "folder"),
    [
        ("dog/1.heic", HEIC, "cat/1.png", "dog"),
        ("dog/deep/1.svg", SVG, "cat/1.png", "dog"),
        ("dog/1", image_bytes(0), "cat/1.png", "dog"),
        ("test/dog/1.jxl", b"\xff\x0a\0", "train/dog/1.png", "test/dog"),
    ],
)
def test_a_class_folder_that_would_lose_all_its_images_is_an_error(
    tmp_path, lost, content, kept, folder
):
    write_images(tmp_path, [kept])
    add(tmp_path, lost, content)
    with pytest.raises(
        SourceError,
        match=rf"/{folder}: this class has no image by its name, but files such as {lost};",
    ):
        opened(tmp_path).survey()
    add(tmp_path, lost, b"notes")  # or a readme, or annotations: no class
    assert [sample.name for sample in read(opened(tmp_path))] == [kept]


# --- folders below folders


def classes(source) -> dict[str, str]:
    names = [info.name for info in source.survey().classes]
    return {sample.name: names[sample.label] for sample in read(source)}


NESTED = [
    "animals/1.png",
    "animals/birds/2.png",
    "animals/birds/sea/3.png",
    "plants/4.png",
    "plants/trees/5.png",
]


def test_everything_below_a_folder_is_of_its_class_as_torchvision_has_it(tmp_path):
    source = opened(write_images(tmp_path, NESTED))
    theirs = ImageFolder(str(tmp_path))
    assert classes(source) == {
        os.path.relpath(path, tmp_path): theirs.classes[label] for path, label in theirs.samples
    }
    assert {sample.split for sample in read(source)} == {"train"}
    assert source.survey().notes == [
        "images in folders below a class folder are of its class: those in animals/birds of class"
        " animals; --class-depth 2 makes classes of deeper folders"
    ]


def test_a_class_depth_makes_classes_of_deeper_folders_and_counts_from_the_split(tmp_path):
    write_images(tmp_path / "one", NESTED)
    named = classes(opened(tmp_path / "one", class_depth=2))
    assert {*named.values()} == {"animals", "animals/birds", "plants", "plants/trees"}
    for split in ("train", "val"):
        write_images(tmp_path / "two" / split, NESTED)
    source = opened(tmp_path / "two", class_depth=2)
    assert classes(source)["val/animals/birds/sea/3.png"] == "animals/birds"
    assert {sample.split for sample in read(source)} == {"train", "val"}


@pytest.mark.parametrize(
    ("paths", "splits"),
    [
        (["train/cat/1.png", "test/cat/1.png"], {"train", "test"}),
        (["Train/cat/1.png", "val2017/cat/1.png"], {"Train", "val2017"}),
        (["train/cat/1.png", "extra/cat/1.png"], {"train", "extra"}),
        # a test split without labels, as Kaggle has it
        (["train/cat/1.png", "test/1.png", "1.png"], {"train"}),
        (["train/1.png", "train/steam/1.png", "plane/1.png"], {"train"}),  # a train is a vehicle
        (["trainers/left/1.png", "test tubes/small/1.png"], {"train"}),
    ],
)
def test_folders_with_the_name_of_a_split_and_no_images_of_their_own_are_splits(
    tmp_path, paths, splits
):
    source = opened(write_images(tmp_path, paths))
    assert {sample.split for sample in read(source)} == splits
    if "1.png" in paths:
        assert "left out 2 images in no class folder, such as 1.png" in source.survey().notes
