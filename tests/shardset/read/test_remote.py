"""Byte ranges of remote shards: pinned to an object, hedged, closed."""

import threading
import time
from concurrent.futures import CancelledError

import pytest

from shardset.errors import DamagedShard, TransientError
from shardset.read.indexes import ShardTable
from shardset.read.remote import RemoteReader
from tests.makers.reading import RecordingStorage
from tests.makers.shardset import put


def test_a_shard_that_is_written_again_with_its_own_bytes_is_read_on(recorded):
    storage, split = recorded
    reader, path = RemoteReader(ShardTable(storage, split)), split.shards[0].path
    before = reader.submit(0, 0, 100).result()
    put(storage.inner, path, storage.inner.read(path))
    for _ in range(2):
        assert reader.submit(0, 0, 100).result() == before
    reader.close()


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: whole[:-1] + b"x", r"crc32c is .*, expected"),
        (lambda whole: whole + b"x", r"\d+ bytes, expected \d+; the shard is cut or replaced"),
        (lambda whole: whole[:50], r"50 bytes, expected \d+; the shard is cut or replaced"),
        (lambda whole: whole[:512], r"512 bytes, expected \d+; the shard is cut or replaced"),
        (None, r"the shard can't be opened \(nothing is stored there\)"),
    ],
)
def test_a_shard_that_is_gone_or_another_object_is_refused(recorded, change, message, was_read):
    storage, split = recorded
    reader, path = RemoteReader(ShardTable(storage, split)), split.shards[0].path
    if was_read:
        assert len(reader.submit(0, 0, 100).result()) == 100
    if change:
        put(storage.inner, path, change(storage.inner.read(path)))
    else:
        storage.inner.delete(path)
    with pytest.raises(DamagedShard, match=f"train-000000.tar: {message}"):
        reader.submit(0, 0, 100).result()
    reader.close()


def reader_that_knows_its_times(storage, split):
    """It has read 1,000 bytes a hundred times, each time at once, and has hedged none."""
    reader, size_class = RemoteReader(ShardTable(storage, split), 8), (1000).bit_length()
    reader.hedges.num_reads[size_class] = 100
    for _ in range(100):
        reader.hedges.note(size_class, 0.001)
    return reader


def test_a_late_read_is_asked_for_again_and_the_first_answer_counts(recorded):
    storage, split = recorded
    reader, held = reader_that_knows_its_times(storage, split), threading.Event()
    asked = len(storage.reads)

    def hold(number, name):
        if number == asked:
            held.wait(600)

    storage.before = hold
    assert len(reader.submit(0, 0, 1000).result(timeout=300)) == 1000
    assert reader.hedges.num_hedges.total() >= 1
    held.set()
    reader.close()


def test_a_late_read_of_a_bucket_that_refuses_reads_is_not_asked_for_again(recorded):
    storage, split = recorded
    looked, held = threading.Semaphore(0), threading.Event()

    class Refusing(RecordingStorage):
        @property
        def is_throttled(self):
            looked.release()
            return True

        @is_throttled.setter
        def is_throttled(self, value): ...

    reader = reader_that_knows_its_times(
        Refusing(storage.inner, before=lambda *_: held.wait(600)), split
    )
    result = reader.submit(0, 0, 1000)
    assert all(looked.acquire(timeout=300) for _ in range(3))
    held.set()
    assert len(result.result(timeout=300)) == 1000
    assert reader.hedges.num_hedges.total() == 0
    reader.close()


def test_a_read_fails_only_when_its_hedge_failed_too(recorded):
    storage, split = recorded
    reader, held = reader_that_knows_its_times(storage, split), threading.Event()
    asked = len(storage.reads)

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
