"""`verify` on sets with large indexes: damage of the checksums of their pages is found, their absence is none."""

import uuid

import numpy as np
import pytest

from pipelines.check.verify import verify
from shardset.checksum import extend_crc32c
from shardset.format.index_pages import ENTRY, entries_of, file_bytes
from shardset.format.tar import StoredSample
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.shardset import put, write_shard_set

SIZE = 2000
FILE = "train/train-00000.idx-pages.npy"
INDEXES = ("train/train-000000.idx.npy", "train/train-000001.idx.npy")


@pytest.fixture(scope="module")
def sound() -> Storage:
    """Two shards with large indexes."""
    samples = [
        StoredSample(key=f"train-of-a-long-name-{number:06d}", fields=(("cls", b"1"),), label=1, source=number)
        for number in range(2 * SIZE)
    ]
    storage = open_storage(f"memory://{uuid.uuid4().hex}/set")
    write_shard_set(storage, {"train": samples}, num_shards=2)
    return storage


@pytest.fixture
def copy(sound: Storage) -> Storage:
    storage = open_storage(f"memory://{uuid.uuid4().hex}/set")
    for stat in sound.list():
        put(storage, stat.name, sound.read(stat.name))
    return storage


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_a_sound_set_is_whole_with_its_checksums_and_without(copy, there, deep):
    if not there:
        copy.delete(FILE)
    assert verify(copy.url, deep=deep).problems == ()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data[:-8], "is not an array of 68 checksums"),
        (lambda data: b"x" + data[1:], "is not an array of 68 checksums"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), f"the checksums of {INDEXES[1]} do not make that of the man"),
    ],
)
def test_damaged_checksums_are_named(copy, change, what, deep):
    put(copy, FILE, change(copy.read(FILE)))
    (problem,) = verify(copy.url, deep=deep).problems
    assert problem.where == FILE
    assert problem.sentence.startswith(what)
    assert problem.sentence.endswith("restore it, or remove all files of this kind: readers then read whole indexes")


def test_wrong_checksums_that_make_the_right_one_together_differ_from_the_index(copy):
    indexes = [copy.read(name) for name in INDEXES]
    entries = np.frombuffer(entries_of(indexes[0]), ENTRY).copy()
    pages_after = bytes(len(indexes[0]) - int(entries[0]) - 64 * (len(indexes[0]) - int(entries[0])) // SIZE)
    wrong = int(entries[2]) ^ 1
    # What the first page adds to the whole, moved on by the pages after it: the last page takes it away again.
    difference = extend_crc32c(int(entries[2]), pages_after) ^ extend_crc32c(wrong, pages_after)
    entries[2], entries[-1] = wrong, int(entries[-1]) ^ difference
    put(copy, FILE, file_bytes([entries.tobytes(), entries_of(indexes[1])]))
    assert verify(copy.url, deep=False).problems == ()
    (problem,) = verify(copy.url, deep=True).problems
    assert problem.where == INDEXES[0]
    assert problem.sentence.startswith("its pages differ from their checksums beside the shards")
