"""What is due at a step of a run, and its learning rate: the same on every host, and right after a
resume by construction.
"""

import math
from dataclasses import dataclass

from trainer.config import TrainConfig

STEP_MARKS = (1 / 3, 2 / 3, 8 / 9)
"""Where `decay="step"` divides by ten, as shares of the run: epochs 30, 60 and 80 of 90."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate: `peak` after `warmup_steps` of linear warm-up, then `decay` until
    `num_steps`, where cosine and linear are 0.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps of a run, counted over its epochs from 0. It ends before `stop`."""

    epochs: int
    steps_per_epoch: int
    stop: int
    rate_at: Schedule
    log_every: int
    save_every: int | None
    profile: range

    def interval_is_over(self, step: int) -> bool:
        """Whether an interval of the log has ended before the newest of so many steps."""
        return (step - 1) % self.log_every == 0

    def save_is_due(self, step: int) -> bool:
        """Whether a checkpoint within an epoch is due after so many steps."""
        return self.save_every is not None and step % self.save_every == 0


def plan_of(config: TrainConfig, steps_per_epoch: int) -> Plan:
    """The plan of a run; `max_steps` does not change its learning rates, so a run in pieces has
    those of a run in one piece.
    """
    num_steps = config.epochs * steps_per_epoch
    return Plan(
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        stop=min(config.max_steps or num_steps, num_steps),
        rate_at=Schedule(
            peak=config.optimizer.learning_rate,
            decay=config.schedule.decay,
            warmup_steps=round(config.schedule.warmup_epochs * steps_per_epoch),
            num_steps=num_steps,
        ),
        log_every=config.log_every_steps,
        save_every=config.checkpoint_every_steps,
        profile=range(*(config.profile_steps or (0, 0))),
    )
