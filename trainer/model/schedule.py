"""Step to learning rate, and nothing else: the same on every host, and right after a resume by
construction.
"""

import math
from dataclasses import dataclass

from trainer.config import TrainConfig

STEP_MARKS = (1 / 3, 2 / 3, 8 / 9)
"""Where `decay="step"` divides by ten, as shares of the run: epochs 30, 60 and 80 of 90."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`peak` after `warmup_steps` of linear warm-up, then `decay` until `num_steps`, where cosine
    and linear are 0.
    """

    peak: float
    decay: str
    warmup_steps: int
    num_steps: int

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer update number `step` (from 0)."""
        start = self.warmup_steps
        if step < start:
            return self.peak * (step + 1) / start
        if self.decay == "step":
            return self.peak * 0.1 ** sum(
                step >= round(mark * self.num_steps) for mark in STEP_MARKS
            )
        done = min(1.0, (step - start) / max(1, self.num_steps - start))
        shares = {
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
            "constant": 1.0,
        }
        return self.peak * shares[self.decay]


def of(config: TrainConfig, steps_per_epoch: int) -> Schedule:
    """The schedule of a run; `max_steps` does not change it, so a run in pieces has the rates of a
    run in one piece.
    """
    return Schedule(
        peak=config.optimizer.learning_rate,
        decay=config.schedule.decay,
        warmup_steps=round(config.schedule.warmup_epochs * steps_per_epoch),
        num_steps=config.epochs * steps_per_epoch,
    )
