"""What `evaluate` finds by class and by sample: printed, and `evaluation.json` in the run folder."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from shardset.prepared import prepared
from shardset.program import count, printable

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

    def name(self, label: int) -> str:
        """The name of a class; its number if no sample has it."""
        return printable(next((one.name for one in self.classes if one.label == label), str(label)))

    def mistakes(self, row: ClassResult) -> str:
        """`dog (3), cat (1)`: what a class is taken for most often."""
        others = sorted((-number, label) for label, number in row.taken_for.items() if label != row.label)
        return ", ".join(f"{self.name(label)} ({-number})" for number, label in others[:3])

    def lines(self) -> Iterator[str]:
        """Accuracy by class, least accurate first, with its mistakes; of few classes the confusion matrix below."""
        rows = sorted(self.classes, key=lambda one: one.accuracy)
        yield "   right  samples  class, and what else it is taken for"
        for one in rows[:MAX_ROWS]:
            yield f"{one.accuracy:>8.2%} {one.samples:>8,}  {self.name(one.label)}: {self.mistakes(one) or '-'}"
        if len(rows) > MAX_ROWS:
            yield f"... and {count(len(rows) - MAX_ROWS, 'more accurate class', 'more accurate classes')}"
        labels = sorted({label for one in self.classes for label in (one.label, *one.taken_for)})
        if len(labels) <= MAX_COLUMNS:
            yield "confusion matrix: true class by line, predicted class by column"
            yield " " * 6 + "".join(f"{label:>6}" for label in labels)
            for one in self.classes:
                yield f"{one.label:>6}" + "".join(f"{one.taken_for.get(label, '.'):>6}" for label in labels)


def class_results(outcomes: np.ndarray, names: Sequence[str]) -> list[ClassResult]:
    """The classes that samples have, by label; `outcomes` is OUTCOME [n] (see metrics.py)."""
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
