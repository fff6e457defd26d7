"""The bytes of samples by the index: of neighbours together, each compared with its checksum."""

import uuid

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import DamagedShard, NotFound
from shardset.format.manifest import LoadedSet, load
from shardset.format.tar import StoredSample
from shardset.read.indexes import read_index
from shardset.read.query import MAX_GAP, contents_of, samples_of, shards_of
from tests.makers.doors import changing
from tests.makers.reading import RecordingStorage
from tests.makers.shardset import new_set
from tests.makers.views import put_view

ORDERS = [("png", "cls"), ("txt", "cls", "png"), ("png",), ("seg.npy", "txt"), ("txt",)]
SAMPLES = [
    StoredSample(
        key=f"s{number}",
        fields=[(field, b"%d %s" % (number, field.encode()) * size) for field in fields],
        label=number % 5,
        serial=number,
    )
    for number, (fields, size) in enumerate(
        zip(ORDERS * 6, [0, 1, 50, 600, 1, 30, 2] * 5, strict=False)
    )
]
URL = new_set(SAMPLES, num_shards=2)


def first_shard(loaded: LoadedSet):
    shard = loaded.manifest.split("train").shards[0]
    return shard, read_index(loaded.storage, shard)


@given(st.sets(st.integers(0, 14)))
def test_some_rows_of_an_index_give_the_fields_of_their_samples_in_the_order_of_the_tar(chosen):
    loaded = load(URL)
    shard, rows = first_shard(loaded)
    found = contents_of(loaded.storage, shard, rows.take(pa.array(sorted(chosen), pa.int64())))
    assert [*found] == [SAMPLES[number].fields for number in sorted(chosen)]


def test_neighbours_share_a_read_and_far_ones_have_others():
    sizes = [9, MAX_GAP + 1, 9, MAX_GAP - 9000, 9, 9 * 2**20, 9]
    samples = [
        StoredSample(key=f"s{number}", fields=[("bin", bytes(size))], label=-1, serial=number)
        for number, size in enumerate(sizes)
    ]
    loaded = load(new_set(samples, num_shards=1))
    storage, (shard, rows) = RecordingStorage(loaded.storage), first_shard(loaded)
    few = rows.take([0, 2, 4, 6])
    assert [dict(fields)["bin"] for fields in contents_of(storage, shard, few)] == [bytes(9)] * 4
    ends = np.cumsum([512 + size + -size % 512 for size in sizes]).tolist()
    starts = [end - size - -size % 512 for size, end in zip(sizes, ends, strict=True)]
    last = starts[0], starts[4], starts[6]
    assert [read[1:3] for read in storage.reads] == [
        (start, stop + 9)
        for start, stop in zip((starts[0], starts[2], starts[6]), last, strict=True)
    ]
    storage.reads.clear()
    assert sum(len(dict(fields)["bin"]) for fields in contents_of(storage, shard, rows)) == sum(
        sizes
    )
    assert max(stop - start for _, start, stop, _ in storage.reads) == 9 * 2**20


def test_bytes_that_a_transfer_damaged_are_read_again():
    loaded = load(URL)
    (shard, rows), asked = first_shard(loaded), list[str]()

    def damage_once(what: str, data: bytes) -> bytes:
        asked.append(what)
        return data if len(asked) > 1 else data.replace(b"3 seg", b"! seg", 1)

    door = changing(loaded.storage, uuid.uuid4().hex, damage_once)
    assert [*contents_of(door, shard, rows)] == [sample.fields for sample in SAMPLES[:15]]
    assert len(asked) == 2


def test_a_sample_that_differs_from_its_checksum_a_cut_and_a_missing_tar_are_named(tmp_path):
    loaded = load(new_set(SAMPLES, tmp_path, num_shards=1))
    shard, rows = first_shard(loaded)
    tar = loaded.storage.read(shard.path)
    at = tar.index(b"3 seg.npy")
    loaded.storage.write(shard.path, tar[:at] + b"!" + tar[at + 1 :])
    where = rf"train-000000\.tar: sample 's3' at byte {at}: its crc32c differs .*; restore it"
    with pytest.raises(DamagedShard, match=where):
        [*contents_of(loaded.storage, shard, rows)]
    others = contents_of(loaded.storage, shard, rows.take([*range(4, 30)]))
    assert len([*others]) == 26
    loaded.storage.write(shard.path, tar[: at + 5])
    with pytest.raises(DamagedShard, match=rf"train-000000\.tar: {at + 5} bytes, expected"):
        [*contents_of(loaded.storage, shard, rows)]
    loaded.storage.delete(shard.path)
    with pytest.raises(NotFound, match=r"train-000000\.tar: nothing is stored there"):
        [*contents_of(loaded.storage, shard, rows)]


def test_the_shards_of_a_view_are_those_that_hold_its_samples():
    loaded = load(new_set(SAMPLES, f"memory://{uuid.uuid4().hex}/set", num_shards=5))
    assert shards_of(loaded, "train") == [0, 1, 2, 3, 4]
    view = load(put_view(loaded.storage.url, loaded, id=[0, 5, 20]))
    assert shards_of(view, "train") == [0, 3]
    assert [rows["id"].to_pylist() for rows in samples_of(view, "train")] == [[0, 5], [20]]
