"""When a request is tried again, after which pause, when to give up; the pace of a process's
requests to a bucket.
"""

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from shardset.errors import (
    NotFound,
    PreconditionFailed,
    StorageError,
    Throttled,
    TransientError,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

FIRST_PER_S, FEWEST_PER_S = 64.0, 0.5
GAIN = 0.05
"""The increase of the rate by an answer, as a share of the rate after the last cut."""
MAY_BE_REFUSED = 0.1
"""The share of the latest requests; servers refuse some at any load, which isn't a reason to slow
down.
"""
LATEST = 64
CALM_S = 60.0
SLOWEST_PER_S = 1 << 16
"""Bytes a second, for each of the requests that share a line."""
PROGRESS_BYTES = 1 << 12
"""How many more bytes give an operation its full patience again."""


def _nothing() -> None: ...


def _jitter() -> float:
    # Not random.random itself: pickling that would give each worker process the same random
    # numbers.
    return random.random()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a request counts as lost, how long to pause before the next one, and when to give up.

    A request is lost if it can't connect or receives nothing for `stall_timeout_s`, or if its
    pieces take longer than `request_deadline_s` and the time of their bytes at 64 KiB/s. Pauses
    double from `first_pause_s` to `max_pause_s`; jitter shortens each by up to half. An operation
    gives up `give_up_after_s` after its first failure since the last progress of 4 KiB. It logs a
    warning if it still fails `warn_after_s` after its first failure. While the server refuses it
    because there are too many requests, it keeps trying for `throttled_give_up_after_s`. In any
    case it gives up `deadline_s` after it began or last made progress. `on_pause` is called before
    each pause.
    """

    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 20.0
    request_deadline_s: float = 20.0
    give_up_after_s: float = 180.0
    throttled_give_up_after_s: float = 1200.0
    deadline_s: float = math.inf
    warn_after_s: float = 10.0
    first_pause_s: float = 0.25
    max_pause_s: float = 16.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = _jitter
    on_pause: Callable[[], None] = _nothing

    def pause_s(self, failures: int) -> float:
        """The pause after that many failures in a row."""
        return min(self.max_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 30)) * (
            1 - self.jitter() / 2
        )

    def deadline_of(self, num_bytes: int) -> float:
        """The seconds that a request of that many bytes may take."""
        return self.request_deadline_s + num_bytes / SLOWEST_PER_S

    def paced(self, pieces: Iterable[bytes], where: str) -> Iterator[bytes]:
        """The pieces of a body; raises TransientError if they arrive slower than 64 KiB/s."""
        began, num_bytes = self.clock(), 0
        for piece in pieces:
            yield piece
            num_bytes += len(piece)
            if self.clock() - began > self.deadline_of(num_bytes):
                raise TransientError(f"{where}: slower than 64 KiB/s")


_of_process: Callable[[], RetryPolicy] = RetryPolicy


def policy_of_process() -> RetryPolicy:
    """The policy of a storage that is given none."""
    return _of_process()


@contextmanager
def while_someone_waits() -> Iterator[None]:
    """Storages that are opened in the block say so after the first failure, or 10 s without an
    answer, and give up after 30 s.
    """
    global _of_process
    _of_process = partial(RetryPolicy, stall_timeout_s=10.0, deadline_s=30.0, warn_after_s=0.0)
    try:
        yield
    finally:
        _of_process = RetryPolicy


_KINDS: dict[int, type[StorageError]] = {
    404: NotFound,
    408: TransientError,
    410: NotFound,
    412: PreconditionFailed,
    429: Throttled,
    503: Throttled,
}


def kind_of(status: int) -> type[StorageError]:
    """The error for the status of an answer that refuses."""
    return _KINDS.get(status, TransientError if status >= 500 else StorageError)


def refusal(kind: type[StorageError], message: str, headers: Mapping[str, str]) -> StorageError:
    """The error for an answer that refuses; a Throttled has the pause that Retry-After asks for."""
    if kind is not Throttled:
        return kind(message)
    text = headers.get("Retry-After", "")
    return Throttled(message, float(text[:9]) if text.isdecimal() else 0.0)


def persist(
    policy: RetryPolicy,
    attempt: Callable[[], T],
    throttle: "Throttle",
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """The result of `attempt`, repeated after each TransientError until the policy gives up.

    The throttle spaces out the attempts. Logs a warning with the reason when this takes longer than
    `warn_after_s`: one for all that share a throttle, until a minute without any.
    """
    began, failures, reached, warn_at = policy.clock(), 0, progress(), 0.0
    refused_since = broken_since = math.inf
    while True:
        asked = policy.clock()
        try:
            return throttle.ask(policy, attempt)
        except TransientError as error:
            now = policy.clock()
            warn_at = warn_at or now + policy.warn_after_s
            if progress() >= reached + PROGRESS_BYTES:
                began, failures, reached = now, 0, progress()
                refused_since = broken_since = math.inf
            failures += 1
            # One that lasts longer than a silence may was sending or receiving: that is not
            # waiting.
            busy_s = max(0.0, now - asked - policy.stall_timeout_s)
            refused_since, broken_since = refused_since + busy_s, broken_since + busy_s
            pause = policy.pause_s(failures)
            if isinstance(error, Throttled):
                broken_since = math.inf  # the link works again
                refused_since = since = min(refused_since, now)
                pause = max(pause, error.retry_after_s)
                patience = policy.throttled_give_up_after_s
                advice = "the server accepts fewer requests than are sent; use fewer readers"
            else:
                broken_since = since = min(broken_since, now)
                patience, advice = policy.give_up_after_s, "check the network and try again"
            patience = min(patience, policy.deadline_s)
            if now - since + pause > patience or now + pause - began > policy.deadline_s:
                tries = f"{failures} tries in {now - began:.0f} s"
                raise TransientError(f"{error}; gave up after {tries}; {advice}") from error
            if now + pause > warn_at:
                warn_at = math.inf
                if throttle.is_news(policy):
                    _log.warning("%s; trying again for %.0f s in all", error, patience)
            policy.on_pause()
            policy.sleep(pause)


class Throttle:
    """Spaces out the requests of all threads: refusals (429, 503) halve their rate, each answer
    adds a little to it.

    Without refusals, nothing waits. `Retry-After` of one answer holds all of them back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._per_s = float("inf")
        self._gain = self._refused_share = 0.0
        self._next = float("-inf")
        self._cut = self._busy_until = self._warned = float("-inf")

    def ask(self, policy: RetryPolicy, request: Callable[[], T]) -> T:
        """The result of `request`, called when it is its turn;
        raises Throttled if it is refused.
        """
        began = self._turn(policy)
        try:
            result = request()
        except Throttled as error:
            self._refused(policy, began, min(error.retry_after_s, policy.throttled_give_up_after_s))
            raise
        with self._lock:
            self._per_s += self._gain
            self._refused_share -= self._refused_share / LATEST
        return result

    def _turn(self, policy: RetryPolicy) -> float:
        """Waits for the next turn and returns its time."""
        while True:
            with self._lock:
                now = policy.clock()
                wait_s = self._next - now
                if wait_s <= 0:
                    self._next = now + 1 / self._per_s
                    return now
            # and again: a refusal may have moved the turn, or another thread have taken it
            policy.sleep(wait_s)

    def _refused(self, policy: RetryPolicy, began: float, retry_after_s: float) -> None:
        with self._lock:
            now = policy.clock()
            self._refused_share += (1 - self._refused_share) / LATEST
            # One that was sent before the last cut is answered by that.
            if self._refused_share > MAY_BE_REFUSED and began > self._cut:
                self._cut = now
                self._per_s = max(FEWEST_PER_S, min(2 * FIRST_PER_S, self._per_s) / 2)
                self._gain = GAIN * self._per_s
            self._next = max(self._next, now + retry_after_s)
            self._busy_until = self._next + CALM_S
            if now < self._warned + CALM_S:  # what was said goes on
                self._warned = now

    def is_busy(self, policy: RetryPolicy) -> bool:
        """Whether the bucket has refused a request within a minute."""
        return policy.clock() < self._busy_until

    def is_news(self, policy: RetryPolicy) -> bool:
        """Whether no thread has had a warning to give for a minute."""
        with self._lock:
            last, self._warned = self._warned, policy.clock()
            return self._warned >= last + CALM_S
