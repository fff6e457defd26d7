"""Samples of shards on a local disk."""

import errno
import os

import pytest

from shardset.errors import DamagedShard, StorageError
from shardset.format.manifest import load
from shardset.format.tar import StoredSample
from shardset.read import local
from shardset.read.indexes import ShardTable
from shardset.read.local import SMALL_BYTES, LocalSampleReader
from shardset.read.sample_reader import open_sample_reader
from tests.makers.reading import order_of, read_epoch
from tests.makers.shardset import new_set, png_samples
from tests.shardset.read.conftest import at


def table_of(folder):
    manifest, storage, _ = load(str(folder))
    return ShardTable(storage, manifest.split("train"))


def test_members_may_stand_in_another_order_than_the_columns_of_the_split(tmp_path):
    samples = [
        StoredSample(key="a", fields=(("jpg", b"A"), ("cls", b"1")), label=1, serial=0),
        StoredSample(key="b", fields=(("png", b"BB"), ("cls", b"2")), label=2, serial=1),
    ]
    new_set(samples, tmp_path, num_shards=1)
    table = table_of(tmp_path)
    assert table.split.fields == ["jpg", "cls", "png"]
    pending = LocalSampleReader(table).read_single(at(table, (0, 1), (0, 0)))
    assert [pending.take(0), pending.take(1)] == [[None, b"2", b"BB"], [b"A", b"1", None]]


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES // 2, 2 * SMALL_BYTES])
def test_each_field_of_a_small_and_of_a_large_sample_is_what_was_stored(tmp_path, num_bytes):
    content = bytes(range(256)) * (num_bytes // 256)
    sample = StoredSample(
        key="a", fields=(("jpg", content), ("json", b""), ("cls", b"1")), label=1, serial=0
    )
    new_set([sample], tmp_path, num_shards=1)
    table = table_of(tmp_path)
    addresses = at(table, (0, 0))
    assert LocalSampleReader(table).read_single(addresses).take(0) == [content, b"", b"1"]
    path = tmp_path / "train" / "train-000000.tar"
    path.write_bytes(path.read_bytes().replace(content[-9:], b"different"))
    with pytest.raises(DamagedShard, match="sample 'a' at byte 512: crc32c is"):
        LocalSampleReader(table).read_single(addresses).take(0)


def test_a_shard_that_the_system_does_not_open_is_no_damage(tmp_path, monkeypatch):
    new_set(png_samples("train", 6, size=8), tmp_path, num_shards=3)
    table = table_of(tmp_path)
    pending = LocalSampleReader(table).read_single(at(table, (1, 0)))

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


def test_local_files_are_opened_once_and_not_too_many_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 2)
    new_set(png_samples("train", 60, size=8), tmp_path, num_shards=6)
    table = table_of(tmp_path)
    order = order_of(table.split)
    assert isinstance(open_sample_reader(order, table, 1 << 20), LocalSampleReader)
    reads = LocalSampleReader(table)
    contents = read_epoch(reads, table, order)
    assert reads.file.cache_info().currsize <= 2
    assert sorted(contents) == list(range(60))
    reads.close()
