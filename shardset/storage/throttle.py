"""The pace of a process's requests to a bucket that refuses some of them."""

import threading
from collections.abc import Callable
from typing import TypeVar

from shardset.errors import Throttled
from shardset.storage.retry import RetryPolicy

T = TypeVar("T")

FIRST_PER_S, FEWEST_PER_S = 64.0, 0.5
GAIN = 0.05
"""What an answer adds to the rate, as a share of the rate after the last cut."""
MAY_BE_REFUSED = 0.1
"""The share of the latest requests; servers refuse some at any load, which is no reason to slow down."""
LATEST = 64
CALM_S = 60.0


class Throttle:
    """Spaces out the requests of all threads: refusals (429, 503) halve their rate, each answer adds a little to it.

    Without refusals, nothing waits. `Retry-After` of one answer holds all of them back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._per_s = float("inf")
        self._gain = self._refused_share = 0.0
        self._next = float("-inf")
        self._cut = self._busy_until = float("-inf")

    def ask(self, policy: RetryPolicy, request: Callable[[], T]) -> T:
        """The result of `request`, called when it is its turn; raises Throttled if the bucket refuses it."""
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
            policy.sleep(wait_s)  # and again: a refusal may have moved the turn, or another thread have taken it

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

    def is_busy(self, policy: RetryPolicy) -> bool:
        """Whether the bucket has refused a request within a minute."""
        return policy.clock() < self._busy_until
