import gzip
import io
import json
import os

import numpy as np
import pytest
from PIL import Image

from pipelines.sources.base import Source
from pipelines.sources.cifar import Cifar10, Cifar100
from shardset.errors import ChangedInput, SourceError
from shardset.format import naming
from tests.makers.cifar import (
    CIFAR10_CLASSES,
    COARSE_CLASSES,
    FINE_CLASSES,
    Batch,
    cifar10,
    cifar100,
    pickle_of,
    python_files,
    tar_of,
    write_archive,
)
from tests.makers.imagenet import put
from tests.makers.spools import MemorySpool
from tests.makers.spools import read as samples_of

PYTHON10, ARCHIVE10 = "cifar-10-batches-py", "cifar-10-python.tar.gz"


def opened(kind, path) -> Source:
    return kind(*kind.find(str(path)))


def read(source):
    """All samples of a source, and its spool."""
    spool = MemorySpool()
    return samples_of(source, spool), spool


def expect_same_pictures(source, batches: list[Batch]):
    samples, spool = read(source)
    rows = [(batch, row) for batch in batches for row in range(len(batch.data))]
    for sample, (batch, row) in zip(samples, rows, strict=True):
        image = Image.open(io.BytesIO(spool.content(sample.fields[sample.image])))
        assert np.array_equal(np.asarray(image), batch.pixels(row))
        assert sample.label == batch.labels[row]
    return samples


@pytest.mark.parametrize(
    ("kind", "batches", "names"),
    [(Cifar10, cifar10(3), CIFAR10_CLASSES), (Cifar100, cifar100(3), FINE_CLASSES)],
)
def test_archive_and_folder_agree(tmp_path, kind, batches, names):
    files = python_files(batches)
    packed = opened(kind, write_archive(tmp_path / "a.tgz", files, kind.folder))
    extracted = opened(kind, put(tmp_path / kind.folder, files))
    (samples, spool), (same, other) = read(packed), read(extracted)
    assert (samples, spool.data) == (same, other.data)
    for source in (packed, extracted):
        classes = [(info.label, info.name) for info in source.survey().classes]
        assert classes == list(enumerate(names))
    splits = [sample.split for sample in expect_same_pictures(packed, batches)]
    assert splits == ["train"] * (len(splits) - 3) + ["test"] * 3


def test_the_coarse_label_of_cifar100_goes_into_json_and_cifar10_has_none(tmp_path):
    samples, _ = read(opened(Cifar100, put(tmp_path / "100", python_files(cifar100(3)))))
    coarse = [label for batch in cifar100(3) for label in batch.coarse]
    expected = [{"coarse_label": label, "coarse_name": COARSE_CLASSES[label]} for label in coarse]
    assert [json.loads(sample.fields["json"]) for sample in samples] == expected
    first = f'{{"coarse_label":{coarse[0]},"coarse_name":"{COARSE_CLASSES[coarse[0]]}"}}'
    assert samples[0].fields["json"] == first.encode()
    samples, _ = read(opened(Cifar10, put(tmp_path / "10", python_files(cifar10(1)))))
    assert [list(sample.fields) for sample in samples] == [["png"]] * 6


def test_keys_tell_batch_and_row_and_names_the_original_file_name_where_there_is_one(tmp_path):
    samples, _ = read(opened(Cifar10, put(tmp_path / PYTHON10, python_files(cifar10(2)))))
    keys, names = zip(*((sample.key, sample.name) for sample in samples), strict=True)
    assert (keys[0], keys[2], keys[-1]) == ("train-1-00000", "train-2-00000", "test-00001")
    assert all(map(naming.is_key, keys))
    # The maker gives rows 0 and 1 the same file name.
    assert names[:2] == tuple(f"data_batch_1/picture_s_000001.png#{row}" for row in (0, 1))
    assert len(set(keys)) == len(set(names)) == len(samples)


# --- where the files are


def test_the_extracted_folder_its_parent_and_before_them_an_archive_are_found(tmp_path):
    files = python_files(cifar10(1))
    put(tmp_path / PYTHON10, files)
    for url in (tmp_path, tmp_path / PYTHON10, f"{tmp_path}/{PYTHON10}/"):
        storage, found = Cifar10.find(str(url))
        assert (storage.url, found) == (str(tmp_path / PYTHON10), None)
    write_archive(tmp_path / ARCHIVE10, files, PYTHON10)
    storage, found = Cifar10.find(str(tmp_path))
    assert (storage.url, found) == (str(tmp_path), ARCHIVE10)


def test_input_without_the_files_is_an_error_that_names_what_is_there_and_what_is_expected(
    tmp_path,
):
    with pytest.raises(SourceError, match=r"found nothing; expected cifar-10-python\.tar\.gz, "):
        Cifar10.find(str(tmp_path))
    (tmp_path / "1.png").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"cifar\.tgz: not there, .*; found 1\.png"):
        opened(Cifar10, tmp_path / "cifar.tgz").survey()


# --- damaged input


def test_a_missing_batch_is_an_error_that_lists_found_and_expected(tmp_path):
    files = python_files(cifar10(1))
    del files["data_batch_3"], files["batches.meta"]
    says = r"found data_batch_1, .*test_batch of .*expected data_batch_3, batches\.meta"
    for path in (write_archive(tmp_path / "a.tgz", files, PYTHON10), put(tmp_path / "b", files)):
        with pytest.raises(SourceError, match=says):
            opened(Cifar10, path).survey()


def test_a_flipped_bit_in_a_picture_is_found_by_the_survey_and_by_a_unit(tmp_path):
    # Stored without compression, so that only the checksum can tell.
    tar = tar_of(python_files(cifar10(2)), PYTHON10)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tar, compresslevel=0, mtime=0))
    source = opened(Cifar10, path)
    [unit, *_] = source.survey().units
    data = bytearray(path.read_bytes())
    data[data.index(cifar10(2)[0].data[1].tobytes()) + 5] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(SourceError, match="CRC"):
        source.survey()
    damaged = opened(Cifar10, path)
    unit["object"]["generation"] = damaged.input.stat("a.tar.gz").generation
    with pytest.raises(SourceError, match="CRC"):
        list(damaged.index(unit, MemorySpool()))


def test_paths_in_an_archive_are_never_used_as_paths_and_no_batch_is_there_twice(
    tmp_path, monkeypatch
):
    files = python_files(cifar10(1))
    monkeypatch.chdir(tmp_path)
    path = write_archive(tmp_path / "a.tar.gz", files, "else/where")
    expect_same_pictures(opened(Cifar10, path), cifar10(1))
    assert sorted(os.listdir(tmp_path)) == ["a.tar.gz"]
    write_archive(path, {**files, "x/test_batch": b"other"}, "a")
    with pytest.raises(SourceError, match="holds test_batch twice"):
        opened(Cifar10, path).survey()


@pytest.mark.parametrize("victim", ["data_batch_2", "batches.meta"])
def test_a_pickle_with_a_call_is_refused_by_name_and_does_not_run(tmp_path, victim, monkeypatch):
    path = put(tmp_path / "in", {**python_files(cifar10(1)), victim: b"cos\nctermid\n(tR."})
    monkeypatch.setattr(os, "ctermid", lambda: pytest.fail("it ran"))
    with pytest.raises(SourceError, match=rf"{victim}: the pickle holds the name os\.ctermid"):
        read(opened(Cifar10, path))


def batch_value(**changes):
    """A batch of two black pictures, with fields changed."""
    return {
        "labels": [1, 2],
        "data": np.zeros((2, 3072), np.uint8),
        "filenames": ["a.png", "b.png"],
        **changes,
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (batch_value(labels=[1, 10]), "row 1: label 10, expected 0 to 9"),
        (batch_value(labels=[1]), "1 labels for 2 pictures"),
        (batch_value(labels=3), "no list 'labels'"),
        (batch_value(labels=["1", "2"]), "no list 'labels' of the right type"),
        (batch_value(filenames=["a.png"]), "1 filenames for 2 pictures"),
        (batch_value(filenames=[1, 2]), "no list 'filenames' of the right type"),
        (batch_value(data=np.zeros((2, 7), np.uint8)), r"shape \(2, 7\), expected \[rows, 3072\]"),
        ([1, 2], "a pickled list, expected a dict"),
        (batch_value(labels=[1, [1]]), "the pickle holds a value of type list"),
    ],
)
def test_a_batch_that_is_not_what_the_format_says_is_an_error(tmp_path, value, message):
    path = put(tmp_path / "in", {**python_files(cifar10(1)), "test_batch": pickle_of(value)})
    with pytest.raises(SourceError, match=rf"test_batch: .*{message}"):
        read(opened(Cifar10, path))


@pytest.mark.parametrize("in_archive", [True, False])
def test_an_input_that_changed_after_the_survey_is_an_error(tmp_path, in_archive):
    if in_archive:
        path = changed = write_archive(tmp_path / "a.tar.gz", python_files(cifar10(1)), PYTHON10)
    else:
        path = put(tmp_path / "in", python_files(cifar10(1)))
        changed = path / "test_batch"
    source = opened(Cifar10, path)
    assert source.survey().objects[changed.name] == changed.stat().st_size
    [*_, unit] = source.survey().units
    changed.write_bytes(changed.read_bytes() + b"\0")
    with pytest.raises(ChangedInput, match="start again"):
        list(source.index(unit, MemorySpool()))
