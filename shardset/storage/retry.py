"""The retry policy of all requests: when to try again, after which pause, and when to give up."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shardset.errors import TransientError

T = TypeVar("T")

_log = logging.getLogger(__name__)


def _jitter() -> float:
    # Not random.random itself: pickling that would give each worker process the same random numbers.
    return random.random()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a request counts as lost, how long to pause before the next one, and when to give up.

    A request is lost if it can't connect, receives nothing for `stall_timeout_s`, or takes longer than
    `request_deadline_s` (checked every 8 MiB; an upload gets its time at 64 KiB/s in addition). Pauses double from
    `first_pause_s` to `max_pause_s`; jitter shortens each by up to half. An operation gives up `give_up_after_s` after
    its first failure since the last new byte, and logs a warning after `warn_after_s`.
    """

    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 20.0
    request_deadline_s: float = 120.0
    give_up_after_s: float = 180.0
    warn_after_s: float = 10.0
    first_pause_s: float = 0.25
    max_pause_s: float = 16.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = _jitter

    def pause_s(self, failures: int) -> float:
        """The pause after that many failures in a row."""
        return min(self.max_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 30)) * (1 - self.jitter() / 2)


def persist(policy: RetryPolicy, attempt: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """The result of `attempt`, repeated after each TransientError until the policy gives up.

    Logs one warning with the reason when this takes longer than `warn_after_s`.
    """
    failures, since, reached, has_warned = 0, 0.0, progress(), False
    while True:
        try:
            return attempt()
        except TransientError as error:
            now = policy.clock()
            if failures == 0 or progress() > reached:
                failures, since, reached = 0, now, progress()
            failures += 1
            pause = policy.pause_s(failures)
            if now + pause - since > policy.give_up_after_s:
                tries = f"{failures} tries in {now - since:.0f} s"
                raise TransientError(f"{error}; gave up after {tries}; check the network and try again") from error
            if now + pause - since > policy.warn_after_s and not has_warned:
                has_warned = True
                _log.warning("%s; trying again for %.0f s in all", error, policy.give_up_after_s)
            policy.sleep(pause)
