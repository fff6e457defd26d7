"""The contents of a checkpoint's state file: plain tensors and numbers, and the position of the
run.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

LearnerState = dict[str, Any]
"""What a learner of any strategy can resume from: weights (`model`), averaged weights (`ema`) and
optimizer state (`optimizer`, by the name of the weight).
"""

CheckpointState = dict[str, Any]
"""The state of a learner, the Position of its run, and `seen`, the SampleDigest of the epoch so
far.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Steps taken, epochs closed by an evaluation, and the results of the evaluations.

    `seconds_to_target` is the time that the run took until an evaluation reached the target
    accuracy.
    """

    step: int = 0
    closed_epochs: int = 0
    best_top1: float | None = None
    best_epoch: int | None = None
    last_top1: float | None = None
    seconds_to_target: float | None = None

    def closed_with(self, top1: float, seconds: float, target: float | None) -> "Position":
        """The position after the evaluation that closes an epoch, `seconds` into the run."""
        is_best = self.best_top1 is None or top1 > self.best_top1
        return replace(
            self,
            closed_epochs=self.closed_epochs + 1,
            best_top1=top1 if is_best else self.best_top1,
            best_epoch=self.closed_epochs if is_best else self.best_epoch,
            last_top1=top1,
            seconds_to_target=seconds if _is_reached(target, top1) else self.seconds_to_target,
        )


def position_of(state: CheckpointState, target: float | None) -> Position:
    """The position in a checkpoint. The target accuracy may have changed since it was written."""
    seconds = (
        (state["seconds_to_target"] or state["seconds"])
        if _is_reached(target, state["last_top1"])
        else None
    )
    saved = Position(**{field.name: state[field.name] for field in fields(Position)})
    return replace(saved, seconds_to_target=seconds)


def _is_reached(target: float | None, top1: float | None) -> bool:
    return target is not None and top1 is not None and top1 >= target
