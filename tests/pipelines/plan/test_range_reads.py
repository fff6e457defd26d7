"""Many readers of one object: so many reads at once and no more, each as planned."""

import threading
import time
import uuid
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest

from pipelines.plan.range_reads import fetch
from pipelines.sources.base import UNREAD, Extent
from shardset.errors import ChangedInput
from shardset.storage.memory import MemoryStorage
from tests.makers.doors import changing

NUM_READS = 48
NOWHERE = MemoryStorage("no-spool-is-read")


@dataclass(frozen=True)
class Slow:
    """A storage that waits for a network: notes how many reads are in flight at once, and how many
    there were.
    """

    inner: MemoryStorage
    most: list[int]
    now: list[int]

    url: ClassVar[str] = "memory://slow"
    is_remote: ClassVar[bool] = True
    is_shared: ClassVar[bool] = False
    reads_at_once: ClassVar[int] = 16
    is_throttled: ClassVar[bool] = False

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        self.now.append(1)
        self.most.append(len(self.now))
        time.sleep(0.001)
        self.now.pop()
        return self.inner.read(name, start, stop, generation=generation)


def slow(num_reads):
    storage = MemoryStorage(uuid.uuid4().hex)
    storage.write("all.tar", bytes(i % 251 for i in range(num_reads * 10)))
    return Slow(storage, [], [])


def in_threads(num_threads, act):
    """What `act` returns in each of so many threads that begin at once."""
    results, begin = [], threading.Barrier(num_threads)
    threads = [
        threading.Thread(target=lambda: (begin.wait(), results.append(act())))
        for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def extents(archive):
    generation = archive.stat("all.tar").generation
    return [[Extent("all.tar", generation, 10 * i, 10)] for i in range(NUM_READS)]


def contents():
    return [[bytes(j % 251 for j in range(10 * i, 10 * i + 10))] for i in range(NUM_READS)]


def test_a_dozen_threads_of_a_process_read_no_more_at_once_than_one_and_each_gets_its_own():
    storage = slow(NUM_READS)
    found = in_threads(12, lambda: list(fetch(extents(storage.inner), storage, NOWHERE)))
    assert found == [contents()] * 12
    assert max(storage.most) <= storage.reads_at_once


def test_a_read_that_fails_and_a_reader_that_stops_leave_room_for_the_others():
    storage = slow(NUM_READS)
    gone = [[Extent("gone.tar", "1", 0, 10)]]
    for _ in range(2 * storage.reads_at_once):
        with pytest.raises(ChangedInput, match=r"gone\.tar: not the object that was planned"):
            list(fetch(gone, storage, NOWHERE))
        with closing(fetch(extents(storage.inner), storage, NOWHERE)) as stopped:
            next(stopped)
    asked = []
    groups = (asked.append(group) or group for group in extents(storage.inner))
    with closing(fetch(groups, storage, NOWHERE)) as last:
        next(last)
        assert len(asked) == storage.reads_at_once


@pytest.mark.parametrize("starts", [[3], [0, 3]], ids=["alone", "with a neighbour"])
def test_bytes_without_a_checksum_are_read_again_where_they_come_short(starts):
    storage, key = MemoryStorage(uuid.uuid4().hex), uuid.uuid4().hex
    storage.write("a.jpg", b"0123456789")
    generation = storage.stat("a.jpg").generation
    group = [
        Extent("a.jpg", generation, start, stop - start) for start, stop in pairwise([*starts, 10])
    ]
    assert {extent.crc32c for extent in group} == {UNREAD}
    cuts = iter([1])
    once_short = changing(storage, key, lambda _, data: data[: len(data) - next(cuts, 0)])
    assert list(fetch([group], once_short, NOWHERE)) == list(fetch([group], storage, NOWHERE))
    always_short = changing(storage, key, lambda _, data: data[:-1])
    with pytest.raises(
        ChangedInput, match=r"a\.jpg, 7 bytes at 3: its bytes changed .*6 bytes, read twice"
    ):
        list(fetch([group], always_short, NOWHERE))
