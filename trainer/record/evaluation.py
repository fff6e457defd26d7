"""What `evaluate` finds by class and by sample: printed, and `evaluation.json` in the run folder."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from shardset.prepared import prepared
from shardset.program import printable

EVALUATION = "evaluation.json"

NUM_WORST = 48
MAX_ROWS = 40
MAX_COLUMNS = 20


@prepared
class ClassResult(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a class, by the class that they are taken for: a row of the confusion matrix without zeros."""

    label: int
    name: str
    samples: int
    right: int
    taken_for: dict[int, int]

    @property
    def accuracy(self) -> float:
        """The share that is right."""
        return self.right / self.samples


@prepared
class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    """A sample and what it is taken for."""

    id: int
    label: int
    predicted: int
    loss: float


@prepared
class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluated split: the classes that it has, and the samples of highest loss, worst first."""

    step: int
    manifest: str
    digest: str
    split: str
    classes: list[ClassResult]
    worst: list[SampleResult]

    def lines(self) -> Iterator[str]:
        """Accuracy by class beside the confusion matrix; of many classes the least accurate, and what they become."""
        names = {one.label: printable(one.name) for one in self.classes}
        is_small = len(self.classes) <= MAX_COLUMNS
        shown = self.classes if is_small else sorted(self.classes, key=lambda one: one.accuracy)[:MAX_ROWS]
        width = max(len(names[one.label]) for one in shown)
        columns = sorted({*names, *(other for one in shown for other in one.taken_for)})
        yield f"{'class':>{width + 6}} {'right':>8} {'samples':>8}  taken for " + (
            "".join(f"{label:>6}" for label in columns) if is_small else "(samples)"
        )
        for one in shown:
            others = sorted((-number, label) for label, number in one.taken_for.items() if label != one.label)
            cells = (
                "".join(f"{one.taken_for.get(label, '.'):>6}" for label in columns)
                if is_small
                else ", ".join(f"{names.get(label, label)} ({-number})" for number, label in others[:3])
            )
            name = f"{one.label:>5} {names[one.label]:<{width}}"
            yield f"{name} {one.accuracy:>8.2%} {one.samples:>8}  {' ' * 10 * is_small}{cells}"
        if len(shown) < len(self.classes):
            yield f"... and {len(self.classes) - len(shown)} more classes"


def class_results(outcomes: np.ndarray, names: Sequence[str]) -> list[ClassResult]:
    """The classes that samples have, by label; `outcomes` is OUTCOME [n] (see outcomes.py)."""
    pairs, numbers = np.unique([outcomes["label"], outcomes["predicted"]], axis=1, return_counts=True)
    rows: dict[int, dict[int, int]] = {}
    for label, predicted, number in zip(*pairs.tolist(), numbers.tolist(), strict=True):
        rows.setdefault(label, {})[predicted] = number
    return [
        ClassResult(
            label=label,
            name=names[label] if label < len(names) else str(label),
            samples=sum(row.values()),
            right=row.get(label, 0),
            taken_for=row,
        )
        for label, row in rows.items()
    ]


def worst_samples(outcomes: np.ndarray) -> list[SampleResult]:
    """The samples of highest loss, worst first."""
    worst = outcomes[np.argsort(-outcomes["loss"], kind="stable")[:NUM_WORST]]
    return [SampleResult(**dict(zip(worst.dtype.names, row, strict=True))) for row in worst.tolist()]
