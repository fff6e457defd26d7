"""Byte ranges of remote shards: pinned to an object, hedged, closed."""

import threading
import time
from concurrent.futures import CancelledError, wait

import pytest

from shardset.errors import DamagedShard, TransientError
from shardset.read.indexes import ShardTable
from shardset.read.remote import RemoteReader
from tests.makers.shardset import put


def test_reads_are_pinned_to_the_generation_that_was_checked(recorded):
    storage, split = recorded
    table = ShardTable(storage, split)
    reader = RemoteReader(table)
    before = reader.submit(0, 0, 100).result()
    assert storage.reads[-1][3] == storage.stat(split.shards[0].path).generation
    put(storage.inner, split.shards[0].path, storage.inner.read(split.shards[0].path)[:-1] + b"x")
    with pytest.raises(DamagedShard, match=r"train-000000.tar: crc32c is .*, expected"):
        reader.submit(0, 0, 100).result()
    assert len(before) == 100
    reader.close()


def test_a_shard_that_is_written_again_with_its_own_bytes_is_read_on(recorded):
    storage, split = recorded
    reader, path = RemoteReader(ShardTable(storage, split)), split.shards[0].path
    before = reader.submit(0, 0, 100).result()
    put(storage.inner, path, storage.inner.read(path))
    for _ in range(2):
        assert reader.submit(0, 0, 100).result() == before
    assert storage.looks == [path] * 2
    assert storage.reads[-1][3] == storage.inner.stat(path).generation
    reader.close()


def test_a_shard_that_goes_while_it_is_read_is_damage(recorded):
    storage, split = recorded
    reader = RemoteReader(ShardTable(storage, split))
    reader.submit(0, 0, 100).result()
    storage.inner.delete(split.shards[0].path)
    with pytest.raises(DamagedShard, match=r"train-000000.tar: the shard can't be opened \(nothing is stored there\)"):
        reader.submit(0, 0, 100).result()
    reader.close()


def test_another_object_under_a_shards_name_is_refused_before_it_is_read(recorded):
    storage, split = recorded
    whole = storage.inner.read(split.shards[0].path)
    put(storage.inner, split.shards[0].path, whole[:-1] + b"x")
    reader = RemoteReader(ShardTable(storage, split))
    with pytest.raises(DamagedShard, match=r"train-000000.tar: crc32c is .*, expected"):
        reader.submit(0, 0, 100).result()
    reader.close()


def test_reads_that_begin_together_look_at_their_shard_once(recorded):
    storage, split = recorded
    reader, held = RemoteReader(ShardTable(storage, split), 8), threading.Event()
    storage.before_look = lambda number: held.wait(600)
    reads = [reader.submit(0, 0, 100) for _ in range(20)]
    held.set()
    assert {read.result(timeout=300) for read in reads} == {storage.inner.read(split.shards[0].path, 0, 100)}
    assert storage.looks == [split.shards[0].path]
    reader.close()


def test_a_look_that_fails_is_raised_to_all_that_wait_and_the_next_read_looks_again(recorded):
    storage, split = recorded
    reader, held = RemoteReader(ShardTable(storage, split), 8), threading.Event()

    def fail(number):
        held.wait(600)
        raise TransientError("no answer")

    storage.before_look = fail
    reads = [reader.submit(0, 0, 100) for _ in range(20)]
    held.set()
    assert {str(read.exception(timeout=300)) for read in reads} == {"no answer"}
    storage.before_look = lambda number: None
    assert len(reader.submit(0, 0, 100).result(timeout=300)) == 100
    reader.close()


def test_a_hedge_does_not_wait_for_a_look_that_stalls(recorded):
    storage, split = recorded
    reader, held = RemoteReader(ShardTable(storage, split), 8), threading.Event()
    wait([reader.submit(0, 0, 1000) for _ in range(100)])
    storage.before_look = lambda number: held.wait(600) if number == 2 else None
    assert len(reader.submit(1, 0, 1000).result(timeout=300)) == 1000
    assert [name == split.shards[1].path for name in storage.looks] == [False, True, True]
    held.set()
    reader.close()


def test_a_late_read_is_asked_for_again_and_the_first_answer_counts(recorded):
    storage, split = recorded
    table = ShardTable(storage, split)
    reader = RemoteReader(table, 8)
    wait([reader.submit(0, 0, 1000) for _ in range(100)])
    held = threading.Event()
    asked = len(storage.reads)

    def hold(number, name):
        if number == asked:
            held.wait(600)

    storage.before = hold
    assert len(reader.submit(0, 0, 1000).result(timeout=300)) == 1000
    assert reader.hedges.num_hedges.total() >= 1
    held.set()
    reader.close()


def test_a_read_fails_only_when_its_hedge_failed_too(recorded):
    storage, split = recorded
    reader = RemoteReader(ShardTable(storage, split), 8)
    wait([reader.submit(0, 0, 1000) for _ in range(100)])
    asked, held = len(storage.reads), threading.Event()

    def break_first(number, name):
        if number == asked:
            held.wait(600)
            raise TransientError("reset")
        held.set()
        time.sleep(0.05)

    storage.before = break_first
    assert len(reader.submit(0, 0, 1000).result(timeout=300)) == 1000
    reader.close()


def test_closing_cancels_what_has_not_been_read(recorded):
    storage, split = recorded
    reader = RemoteReader(ShardTable(storage, split), 1)
    reader.submit(0, 0, 10).result()
    held = threading.Event()
    storage.before = lambda number, name: held.wait(600)
    waiting = [reader.submit(0, 0, 10) for _ in range(5)]
    reader.close()
    assert all(isinstance(future.exception(timeout=300), CancelledError) for future in waiting)
    held.set()
