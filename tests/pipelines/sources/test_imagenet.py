import os
import re
import tarfile
from typing import Any

import pytest

from pipelines.sources.imagenet import ImageNet
from pipelines.sources.synsets import read_mapping, read_solution
from shardset.errors import SourceError
from shardset.storage.open import open_storage
from tests.makers import imagenet as maker
from tests.makers.spools import contents, everything
from tests.makers.tars import content_offset, plain, special, tar_bytes, tar_of

LAYOUTS = {"archives": maker.archives, "kaggle": maker.kaggle, "class folders": maker.class_folders}
TRAIN_TAR, VALIDATION_TAR, DEVKIT = (
    "ILSVRC2012_img_train.tar",
    "ILSVRC2012_img_val.tar",
    "ILSVRC2012_devkit_t12.tar.gz",
)


def source_of(tmp_path, files) -> ImageNet:
    return ImageNet(open_storage(str(maker.put(tmp_path / "in", files))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_samples_labels_and_bytes(tmp_path, layout):
    images = maker.images()
    source = source_of(tmp_path, LAYOUTS[layout](images))
    survey, samples, rejected = everything(source)
    assert rejected == []
    found = {(s.split, s.key, maker.WNIDS[s.label], contents(source, s)["jpg"]) for s in samples}
    assert found == {(image.split, image.key, image.wnid, image.content) for image in images}
    assert len(samples) == len(images)
    assert [(info.label, info.wnid) for info in survey.classes] == list(enumerate(maker.WNIDS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_classes_are_called_by_the_first_word_of_their_synset_or_else_by_wnid(tmp_path, layout):
    survey = source_of(tmp_path, LAYOUTS[layout](maker.images())).survey()
    has_tables = layout != "class folders"
    assert [info.name for info in survey.classes] == (
        ["tench", "goldfish", "kit fox", "projectile"] if has_tables else maker.WNIDS
    )
    unnamed = f"no {DEVKIT} and no LOC_synset_mapping.txt: classes are named by their wnids"
    assert survey.notes == ([] if has_tables else [unnamed])


def test_a_sample_of_the_archives_is_a_range_of_the_outer_tar(tmp_path):
    files = maker.archives(maker.images())
    source = source_of(tmp_path, files)
    survey, [first, *_], _ = everything(source)
    extent: Any = first.fields["jpg"]
    assert first.name == "ILSVRC2012_img_train.tar/n01440764.tar/n01440764_7.JPEG"
    assert extent.generation == source.input.stat(extent.object).generation
    assert files[TRAIN_TAR][extent.offset :].startswith(contents(source, first)["jpg"])
    assert survey.objects == {name: len(data) for name, data in files.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_subset_of_classes_works_and_what_is_left_out_is_counted(tmp_path, layout):
    some = [maker.WNIDS[0], maker.WNIDS[2]]
    source = source_of(tmp_path, LAYOUTS[layout](maker.images(some)))
    survey, samples, _ = everything(source)
    assert [info.wnid for info in survey.classes] == some
    assert {(s.key, s.label) for s in samples if s.split == "validation"} == {
        (f"ILSVRC2012_val_{number:08d}", some.index(wnid))
        for number, wnid in enumerate(maker.TRUTH, start=1)
        if wnid in some
    }
    assert (
        "3 of 7 validation samples are of classes without training data: left out" in survey.notes
    )


@pytest.mark.parametrize(
    ("layout", "gone", "note"),
    [
        ("archives", "ILSVRC2012_img_val", "no ILSVRC2012_img_val.tar: only split train"),
        ("archives", "_img_val|_devkit", "no ILSVRC2012_img_val.tar: only split train"),
        ("kaggle", "CLS-LOC/val/", "no ILSVRC/Data/CLS-LOC/val/: only split train"),
        ("class folders", "val/", "no val/: only split train"),
    ],
)
def test_missing_validation_is_stated(tmp_path, layout, gone, note):
    files = LAYOUTS[layout](maker.images())
    files = {name: data for name, data in files.items() if not re.search(gone, name)}
    survey, samples, _ = everything(source_of(tmp_path, files))
    assert note in survey.notes
    assert {sample.split for sample in samples} == {"train"}


@pytest.mark.parametrize(
    ("layout", "gone"), [("archives", DEVKIT), ("kaggle", "LOC_val_solution.csv")]
)
def test_validation_without_its_labels_is_an_error(tmp_path, layout, gone):
    files = LAYOUTS[layout](maker.images())
    del files[gone]
    with pytest.raises(SourceError, match=gone):
        source_of(tmp_path, files).survey()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cat.jpg", r"(?s)ILSVRC2012_img_train.tar.*CLS-LOC.*train/nNNNNNNNN/.*found cat.jpg"),
        ("train/cats/1.jpg", "`folder`"),
    ],
)
def test_a_folder_that_is_no_imagenet_says_what_was_looked_for(tmp_path, name, message):
    with pytest.raises(SourceError, match=message):
        source_of(tmp_path, {name: b"1"}).survey()


def test_validation_folders_may_be_called_validation_and_be_in_kaggles_tree(tmp_path):
    files = maker.class_folders(maker.images(), "validation")
    tables = {
        name: data
        for name, data in maker.kaggle(maker.images()).items()
        if name.startswith("LOC_syn")
    }
    for place, prefix in (("plain", ""), ("kaggle", "ILSVRC/Data/CLS-LOC/")):
        folders = {f"{prefix}{name}": data for name, data in files.items()} | tables
        survey, samples, _ = everything(source_of(tmp_path / place, folders))
        assert (len(samples), survey.notes) == (len(maker.images()), [])


def test_a_class_that_the_devkit_does_not_know_is_an_error(tmp_path):
    files = maker.archives(maker.images())
    files[TRAIN_TAR] = tar_bytes({"n99999999.tar": tar_bytes({"n99999999_1.JPEG": b"1"})})
    with pytest.raises(
        SourceError, match=r"1 classes that the table of synsets does not know: n99999999"
    ):
        source_of(tmp_path, files).survey()


def test_an_inner_tar_that_is_cut_is_named_with_its_offset(tmp_path):
    first, second = maker.WNIDS[1:3]
    inner = tar_bytes({"a.JPEG": bytes(3000)})
    inner_tars = {f"{first}.tar": inner[:2048], f"{second}.tar": tar_bytes({})}
    files = {TRAIN_TAR: tar_bytes(inner_tars)}
    source = source_of(tmp_path, files)
    cut, empty = source.survey().units
    start = content_offset(files[TRAIN_TAR], f"{first}.tar")
    says = rf"{first}\.tar \(from byte {start}\): cut at byte {start + 2048}"
    with pytest.raises(SourceError, match=says):
        list(source.index(cut, None))
    assert list(source.index(empty, None)) == []


def test_what_is_no_plain_file_is_rejected_by_name_and_what_is_no_class_archive_is_noted(tmp_path):
    inner = tar_of(
        [
            (special("n01440764_1.JPEG", tarfile.SYMTYPE, "b.JPEG"), b""),
            (special("b.JPEG", tarfile.FIFOTYPE), b""),
        ]
    )
    members = [(plain("n01440764.tar", inner), inner), (plain("readme.txt", b"1"), b"1")]
    survey, samples, rejected = everything(source_of(tmp_path, {TRAIN_TAR: tar_of(members)}))
    assert samples == []
    assert (
        f"left out 1 files in {TRAIN_TAR} that are no nNNNNNNNN.tar, such as readme.txt"
        in survey.notes
    )
    found = [(entry.name.partition("/")[2], entry.reason.split(";")[0]) for entry in rejected]
    assert found == [
        ("n01440764.tar/n01440764_1.JPEG", "is a link to 'b.JPEG'"),
        ("n01440764.tar/b.JPEG", "is no regular file (tar type b'6')"),
    ]


def test_validation_images_without_a_label_are_rejected(tmp_path):
    files = maker.kaggle(maker.images())
    lines = files["LOC_val_solution.csv"].splitlines(keepends=True)
    files["LOC_val_solution.csv"] = b"".join(line for line in lines if b"val_00000003" not in line)
    _, _, [gap] = everything(source_of(tmp_path / "gap", files))
    reason = f"has no label in {DEVKIT} or LOC_val_solution.csv"
    assert gap.reason == reason
    files = maker.archives(maker.images())
    images = {f"{one.key}.JPEG": one.content for one in maker.images() if one.split == "validation"}
    odd = {"ILSVRC2012_val_00000008.JPEG": b"8", "cat.JPEG": b"c"}
    files[VALIDATION_TAR] = tar_bytes(images | odd)
    _, samples, rejected = everything(source_of(tmp_path, files))
    assert sum(sample.split == "validation" for sample in samples) == len(maker.TRUTH)
    assert [entry.name.rpartition("/")[2] for entry in rejected] == [*odd]
    assert {entry.reason for entry in rejected} == {reason}


def test_what_is_in_no_class_folder_or_no_image_is_counted_and_hidden_files_are_ignored(tmp_path):
    files = maker.class_folders(maker.images())
    files |= {
        "train/.DS_Store": b"1",
        "train/n01440764/Thumbs.db": b"2",
        "train/cat.jpg": b"3",
        "val/x/dog.png": b"4",
    }
    survey, samples, rejected = everything(source_of(tmp_path, files))
    assert (len(samples), rejected) == (len(maker.images()), [])
    assert survey.notes[:-1] == [
        "left out 2 files in train/ that are no images in folders nNNNNNNNN, such as train/cat.jpg",
        "left out 1 files in val/ that are no images in folders nNNNNNNNN, such as val/x/dog.png",
    ]


def test_a_file_name_that_is_not_utf8_is_an_error_that_prints_it(tmp_path):
    source = source_of(tmp_path, maker.class_folders(maker.images()))
    (tmp_path / "in/train/n01440764" / os.fsdecode(b"k\xe4se.JPEG")).write_bytes(b"1")
    with pytest.raises(SourceError, match=r"k\\xe4se\.JPEG: this name is not valid UTF-8; rename"):
        everything(source)


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (maker.devkit()[:200], "cut or damaged"),
        (maker.pack_devkit(b"", b"1\n"), "holds no meta.mat"),
        (maker.pack_devkit(maker.meta()[:300], b"1\n"), "no table of synsets"),
        (maker.pack_devkit(maker.meta(), b"1\n77\n"), "line 2 is '77', expected an ILSVRC2012_ID"),
    ],
    ids=range(4),
)
def test_a_broken_devkit_is_an_error_that_says_where(tmp_path, packed, says):
    files = maker.archives(maker.images()) | {DEVKIT: packed}
    with pytest.raises(SourceError, match=says):
        source_of(tmp_path, files).survey()


HEAD = b"ImageId,PredictionString\n"


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        (read_mapping, b"tench\n", "line 1"),
        (read_solution, b"a,b\n", "its head is"),
        (read_solution, HEAD, "no row"),
        (read_solution, HEAD + b"ILSVRC2012_val_00000001,cat 1 2 3 4\n", "line 2"),
        (read_solution, HEAD + b"ILSVRC2012_val_1,n01440764 1 2 3 4\n", "line 2"),
    ],
)
def test_tables_of_another_shape_are_refused(read, text, says):
    with pytest.raises(SourceError, match=f"table: .*{says}"):
        read(text, "table")
