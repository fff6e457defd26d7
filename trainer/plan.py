"""What is due at a step of a run, and its learning rate: the same on every host, and right after a
resume by construction.
"""

import math
from dataclasses import dataclass
from typing import Any

from shardset.settings import values_of
from trainer.config import ModelConfig, TrainConfig
from trainer.data.epochs import order_of
from trainer.data.splits import Data
from trainer.runtime.base import Runtime

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
    """What follows from the settings and the data of a run: its steps, counted over its epochs from
    0, of which it takes those below `stop`, and what must agree.

    This process brings `num_rows` rows to a step. `identity` has the values that a checkpoint must
    share with the run that resumes from it, `facts` those that all hosts must share.
    """

    config: TrainConfig
    steps_per_epoch: int
    stop: int
    rate_at: Schedule
    num_rows: int
    order: str | None
    identity: dict[str, Any]
    facts: dict[str, Any]

    def name_of(self, epoch: int) -> str:
        """`epoch 1/90`: people count from 1."""
        return f"epoch {epoch + 1}/{self.config.epochs}"

    def interval_is_over(self, step: int) -> bool:
        """Whether an interval of the log has ended before the newest of so many steps."""
        return (step - 1) % self.config.log_every_steps == 0

    def save_is_due(self, step: int) -> bool:
        """Whether a checkpoint within an epoch is due after so many steps."""
        every = self.config.checkpoint_every_steps
        return every is not None and step % every == 0

    def is_profiled(self, step: int) -> bool:
        """Whether a trace shows the step."""
        return step in range(*(self.config.profile_steps or (0, 0)))


def plan_of(config: TrainConfig, data: Data, runtime: Runtime) -> Plan:
    """The plan of a run; `max_steps` does not change its learning rates, so a run in pieces has
    those of a run in one piece.
    """
    rate_at = schedule_of(config, len(data.train))
    order, settings = order_of(data.train, 0, 0), values_of(config)
    digest = {"manifest digest": data.manifest_digest}
    common = ("train_split", "seed", "global_batch_size")
    return Plan(
        config=config,
        steps_per_epoch=len(data.train),
        stop=min(config.max_steps or rate_at.num_steps, rate_at.num_steps),
        rate_at=rate_at,
        num_rows=runtime.num_rows(config.global_batch_size, config.accumulate),
        order=order,
        identity={
            **digest,
            "mix": [*data.mix],
            **{name: settings[name] for name in common},
            "augment_repeats": config.image.augment_repeats,
            **model_identity_of(config.model, data.num_classes),
            "optimizer": config.optimizer.name,
        },
        # each host may have its own copy of the shard set
        facts={
            **digest,
            "hosts": runtime.num_hosts,
            "order": order,
            **{key: value for key, value in settings.items() if key not in ("manifest", "mix")},
        },
    )


def schedule_of(config: TrainConfig, steps_per_epoch: int) -> Schedule:
    """The learning rate of each step."""
    return Schedule(
        peak=config.optimizer.learning_rate,
        decay=config.schedule.decay,
        warmup_steps=round(config.schedule.warmup_epochs * steps_per_epoch),
        num_steps=config.epochs * steps_per_epoch,
    )


def model_identity_of(model: ModelConfig, num_classes: int) -> dict[str, Any]:
    """The values that a checkpoint must share with an evaluation of it."""
    return {"model": f"{model.name} stem={model.stem} norm={model.norm} classes={num_classes}"}
