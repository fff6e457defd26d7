"""Samples of shards on a local disk."""

import errno
import os

import numpy as np
import pytest

from shardset.errors import DamagedShard, StorageError
from shardset.format.manifest import load
from shardset.format.tar import StoredSample
from shardset.read.blocks import open_sample_reader
from shardset.read.indexes import ShardTable
from shardset.read.local import SMALL_BYTES, LocalSampleReader
from shardset.storage.open import open_storage
from tests.makers.reading import addresses_of, order_of
from tests.makers.shardset import png_samples, write_shard_set


def test_members_may_stand_in_another_order_than_the_columns_of_the_split(tmp_path):
    samples = [
        StoredSample(key="a", fields=(("jpg", b"A"), ("cls", b"1")), label=1, source=0),
        StoredSample(key="b", fields=(("png", b"BB"), ("cls", b"2")), label=2, source=1),
    ]
    write_shard_set(open_storage(str(tmp_path)), {"train": samples}, num_shards=1)
    manifest, storage, _ = load(str(tmp_path))
    table = ShardTable(storage, manifest.split("train"))
    assert table.split.fields == ["jpg", "cls", "png"]
    pending = LocalSampleReader(table).read_single(
        table.addresses(np.array([0, 0]), np.array([1, 0]))
    )
    assert [pending.take(0), pending.take(1)] == [[None, b"2", b"BB"], [b"A", b"1", None]]


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES // 2, 2 * SMALL_BYTES])
def test_each_field_of_a_small_and_of_a_large_sample_is_what_was_stored(tmp_path, num_bytes):
    content = bytes(range(256)) * (num_bytes // 256)
    sample = StoredSample(
        key="a", fields=(("jpg", content), ("json", b""), ("cls", b"1")), label=1, source=0
    )
    write_shard_set(open_storage(str(tmp_path)), {"train": [sample]}, num_shards=1)
    manifest, storage, _ = load(str(tmp_path))
    table = ShardTable(storage, manifest.split("train"))
    addresses = table.addresses(np.array([0]), np.array([0]))
    assert LocalSampleReader(table).read_single(addresses).take(0) == [content, b"", b"1"]
    path = tmp_path / "train" / "train-000000.tar"
    path.write_bytes(path.read_bytes().replace(content[-9:], b"different"))
    with pytest.raises(DamagedShard, match="sample 'a' at byte 512: crc32c is"):
        LocalSampleReader(table).read_single(addresses).take(0)


def test_a_shard_that_the_system_does_not_open_is_no_damage(tmp_path, monkeypatch):
    write_shard_set(
        open_storage(str(tmp_path)), {"train": png_samples("train", 6, size=8)}, num_shards=3
    )
    manifest, storage, _ = load(str(tmp_path))
    table = ShardTable(storage, manifest.split("train"))
    pending = LocalSampleReader(table).read_single(table.addresses(np.array([1]), np.array([0])))

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(
            StorageError, match=r"train-000001.tar: too many open files; raise the limit"
        ) as raised:
            pending.take(0)
    assert not isinstance(raised.value, DamagedShard)
    assert pending.take(0)


def test_local_files_are_opened_once_and_not_too_many_at_a_time(tmp_path):
    write_shard_set(
        open_storage(str(tmp_path)), {"train": png_samples("train", 60, size=8)}, num_shards=6
    )
    manifest, storage, _ = load(str(tmp_path))
    split = manifest.split("train")
    table, order = ShardTable(storage, split), order_of(split)
    assert isinstance(open_sample_reader(order, table, 1 << 20), LocalSampleReader)
    reads = LocalSampleReader(table, max_open_files=2)
    contents = {}
    for step in range(order.num_batches):
        slots = order.batch(0, step)
        pending = reads.read_step(0, slots, addresses_of(table, order, slots.ids))
        contents |= {id_: pending.take(number) for number, id_ in enumerate(slots.ids.tolist())}
        assert reads.file.cache_info().currsize <= 2
    assert sorted(contents) == list(range(60))
    reads.close()
