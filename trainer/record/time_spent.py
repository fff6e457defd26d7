"""The seconds of a run by what it did."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class TimeSpent:
    """Seconds since construction, by part; the steps have what the other parts leave."""

    clock: Callable[[], float] = time.perf_counter
    first_step: float = 0.0
    input_wait: float = 0.0
    evaluation: float = 0.0
    checkpoint: float = 0.0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def seconds(self) -> dict[str, float]:
        """Seconds by part, as a FinalRecord has them."""
        parts = {
            "input_wait_seconds": self.input_wait,
            "first_step_seconds": self.first_step,
            "evaluation_seconds": self.evaluation,
            "checkpoint_seconds": self.checkpoint,
        }
        return {"step_seconds": max(0.0, self.clock() - self.started - sum(parts.values())), **parts}


PARTS = {
    "step_seconds": "steps",
    "input_wait_seconds": "waiting for data",
    "first_step_seconds": "the first step",
    "evaluation_seconds": "evaluations",
    "checkpoint_seconds": "checkpoints",
}
"""What people call each part."""


def in_words(seconds: dict[str, float]) -> str:
    """`steps 81 % (12 s), ...`: each part that took any time; empty if none did."""
    total = sum(seconds.values())
    parts = [f"{PARTS[name]} {100 * own / total:.0f} % ({own:.1f} s)" for name, own in seconds.items() if own > 0]
    return ", ".join(parts)
