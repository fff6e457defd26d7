"""Byte ranges of remote shards: pinned to an object, hedged, closed."""

import threading
import time
from concurrent.futures import CancelledError

import pytest

from shardset.errors import DamagedShard, TransientError
from shardset.read.remote import RemoteReader
from shardset.storage.many import REQUESTS_AT_ONCE
from tests.makers.reading import RecordingStorage
from tests.makers.shardset import put


def test_a_shard_that_is_written_again_with_its_own_bytes_is_read_on(recorded, reader):
    storage, split = recorded
    path = split.shards[0].path
    before = reader.submit(0, 0, 100).result()
    put(storage.inner, path, storage.inner.read(path))
    for _ in range(2):
        assert reader.submit(0, 0, 100).result() == before


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: whole[:-1] + b"x", r"crc32c is .*, expected"),
        (lambda whole: whole + b"x", r"\d+ bytes, expected \d+; the shard is cut or replaced"),
        (lambda whole: whole[:50], r"50 bytes, expected \d+; the shard is cut or replaced"),
        (None, r"the shard can't be opened \(nothing is stored there\)"),
    ],
)
def test_a_shard_that_is_gone_or_another_object_is_refused(
    recorded, reader, change, message, was_read
):
    storage, split = recorded
    path = split.shards[0].path
    if was_read:
        assert len(reader.submit(0, 0, 100).result()) == 100
    if change:
        put(storage.inner, path, change(storage.inner.read(path)))
    else:
        storage.inner.delete(path)
    with pytest.raises(DamagedShard, match=f"train-000000.tar: {message}"):
        reader.submit(0, 0, 100).result()


@pytest.fixture
def experienced(reader):
    """It has read 1,000 bytes a hundred times, each time at once, and has hedged none."""
    size_class = (1000).bit_length()
    reader.hedges.num_reads[size_class] = 100
    for _ in range(100):
        reader.hedges.note(size_class, 0.001)
    return reader


def test_a_late_read_is_asked_for_again_and_the_first_answer_counts(recorded, experienced):
    storage, held = recorded[0], threading.Event()
    asked = len(storage.reads)

    def hold(number, name):
        if number == asked:
            held.wait(600)

    storage.before = hold
    assert len(experienced.submit(0, 0, 1000).result(timeout=300)) == 1000
    assert experienced.hedges.num_hedges.total() >= 1
    held.set()


def test_a_late_read_of_a_bucket_that_refuses_reads_is_not_asked_for_again(
    recorded, table, experienced
):
    looked, held = threading.Semaphore(0), threading.Event()

    class Refusing(RecordingStorage):
        @property
        def is_throttled(self):
            looked.release()
            return True

        @is_throttled.setter
        def is_throttled(self, value): ...

    table.storage = Refusing(recorded[0].inner, before=lambda *_: held.wait(600))
    result = experienced.submit(0, 0, 1000)
    assert all(looked.acquire(timeout=300) for _ in range(3))
    held.set()
    assert len(result.result(timeout=300)) == 1000
    assert experienced.hedges.num_hedges.total() == 0


def test_a_read_fails_only_when_its_hedge_failed_too(recorded, experienced):
    storage, held = recorded[0], threading.Event()
    asked = len(storage.reads)

    def break_first(number, name):
        if number == asked:
            held.wait(600)
            raise TransientError("reset")
        held.set()
        time.sleep(0.05)

    storage.before = break_first
    assert len(experienced.submit(0, 0, 1000).result(timeout=300)) == 1000


def test_closing_cancels_what_has_not_been_read(recorded, table):
    storage, held = recorded[0], threading.Event()
    reader = RemoteReader(table)
    reader.submit(0, 0, 10).result()
    storage.before = lambda number, name: held.wait(600)
    waiting = [reader.submit(0, 0, 10) for _ in range(REQUESTS_AT_ONCE + 5)]
    reader.close()
    assert all(isinstance(future.exception(timeout=300), CancelledError) for future in waiting)
    held.set()
