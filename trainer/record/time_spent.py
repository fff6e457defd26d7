"""The seconds of a run by what it did."""

import time
from collections.abc import Callable, Mapping

PARTS = {
    "step_seconds": "steps",
    "input_wait_seconds": "waiting for data",
    "first_step_seconds": "the first step",
    "evaluation_seconds": "evaluations",
    "checkpoint_seconds": "checkpoints",
}
"""The parts as a FinalRecord names them, and what people call each."""


class TimeSpent:
    """Seconds since construction. `parts` has those of all parts but the steps, which have what these leave."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._started = clock, clock()
        self.parts = dict.fromkeys(PARTS, 0.0)

    def total(self) -> float:
        """Seconds since construction."""
        return self._clock() - self._started

    def seconds(self) -> dict[str, float]:
        """Seconds by part."""
        return self.parts | {"step_seconds": max(0.0, self.total() - sum(self.parts.values()))}


def in_words(seconds: Mapping[str, float]) -> str:
    """`steps 81 % (12 s), ...`: each part that took any time; empty if none did."""
    total = sum(seconds.values())
    parts = [f"{PARTS[name]} {100 * own / total:.0f} % ({own:.1f} s)" for name, own in seconds.items() if own > 0]
    return ", ".join(parts)
