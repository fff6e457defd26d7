"""Many readers of a bucket that serves few: in virtual time, with the real retries and the real
throttle.
"""

import heapq
import itertools
import random
import threading
from collections import Counter
from dataclasses import dataclass, field

import pytest

from shardset.errors import Throttled, TransientError
from shardset.storage.retry import RetryPolicy, Throttle, persist
from tests.makers.objects import Clock

NUM_READERS, NUM_FETCHERS, SERVED_PER_S = 16, 32, 10
"""A 500th of 8,000 readers, and of the 5,000 reads a second that a bucket serves at first."""

LATENCY_S = 0.03


class Over(BaseException):
    """The simulation has ended."""


@dataclass
class World:
    """Threads of which one runs at a time: `sleep` hands over to the next one to wake, and moves
    the clock there.
    """

    until: float = 0.0
    now: float = 0.0
    _heap: list = field(default_factory=list)
    _numbers: itertools.count = field(default_factory=itertools.count)

    def clock(self):
        return self.now

    def sleep(self, seconds):
        own = self._wait_until(self.now + seconds)
        self._wake_next()
        own.acquire()
        if self.now > self.until:
            raise Over

    def run(self, function, num_threads, until):
        self.until = until
        locks = [self._wait_until(0.0) for _ in range(num_threads)]
        threads = [
            threading.Thread(target=self._run, args=[function, own], daemon=True) for own in locks
        ]
        for thread in threads:
            thread.start()
        self._wake_next()
        for thread in threads:
            thread.join()

    def _run(self, function, own):
        own.acquire()
        try:
            function()
        except Over:
            pass
        finally:
            self._wake_next()

    def _wait_until(self, time):
        own = threading.Lock()
        own.acquire()
        heapq.heappush(self._heap, (time, next(self._numbers), own))
        return own

    def _wake_next(self):
        if self._heap:
            self.now, _, own = heapq.heappop(self._heap)
            own.release()


def storm(until, retry_after_s=0.0):
    """(requests asked, requests served) in each minute, and when readers gave up."""
    world, draw = World(), random.Random(7)
    asked, served, in_second, gave_up = Counter(), Counter(), Counter(), []
    policy = RetryPolicy(
        clock=world.clock, sleep=world.sleep, jitter=draw.random, warn_after_s=float("inf")
    )
    readers = itertools.cycle([Throttle() for _ in range(NUM_READERS)])

    def request():
        asked[int(world.now // 60)] += 1
        world.sleep(LATENCY_S)
        if in_second[int(world.now)] == SERVED_PER_S:
            raise Throttled("503", retry_after_s)
        in_second[int(world.now)] += 1
        served[int(world.now // 60)] += 1

    def fetch():
        throttle = next(readers)
        try:
            while True:
                persist(policy, request, throttle)
        except TransientError:
            gave_up.append(world.now)

    world.run(fetch, NUM_READERS * NUM_FETCHERS, until)
    return asked, served, gave_up


@pytest.mark.slow
def test_readers_of_a_bucket_that_serves_few_ask_for_hardly_more_and_none_gives_up():
    asked, served, gave_up = storm(until=360)
    assert asked[0] < 2.5 * served[0]
    assert all(asked[minute] < 1.15 * served[minute] for minute in range(1, 6))
    assert all(served[minute] > 0.65 * 60 * SERVED_PER_S for minute in range(1, 6))
    assert not gave_up


def test_a_refusal_holds_back_every_thread_for_as_long_as_it_asks_for():
    asked, _, _ = storm(until=300, retry_after_s=100)
    assert all(asked[minute] < 4 * NUM_READERS for minute in range(1, 5))


def test_a_reader_that_is_refused_once_soon_reads_as_before():
    clock, throttle, refusals = Clock(), Throttle(), [Throttled("503")]
    policy = RetryPolicy(clock=clock, sleep=clock.sleep, jitter=lambda: 0)

    def request():
        clock.sleep(LATENCY_S)
        if refusals:
            raise refusals.pop()

    for _ in range(400):
        persist(policy, request, throttle)
    assert clock.now < 400 * LATENCY_S + 3


def test_pauses_of_two_readers_differ():
    policy = RetryPolicy()
    assert len({policy.pause_s(3) for _ in range(20)}) == 20
    assert all(0.5 <= policy.pause_s(3) <= 1.0 for _ in range(100))
    assert RetryPolicy(jitter=lambda: 0.0).pause_s(1000) == 16.0
