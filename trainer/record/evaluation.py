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
class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluated split. `confusion` counts samples by (label, predicted label); pairs without samples are left out.

    `worst` are the samples of highest loss, worst first: (id, loss, label, predicted label).
    """

    step: int
    manifest: str
    digest: str
    split: str
    classes: Sequence[str]
    confusion: list[tuple[int, int, int]]
    worst: list[tuple[int, float, int, int]]

    def name(self, label: int) -> str:
        """The name of a class; its number where it has none."""
        return printable(self.classes[label]) if label < len(self.classes) else str(label)

    def by_class(self) -> list[tuple[str, int, float, str]]:
        """(class, samples, accuracy, what it is most often taken for), least accurate first."""
        rows: dict[int, dict[int, int]] = {}
        for label, predicted, number in self.confusion:
            rows.setdefault(label, {})[predicted] = number
        found = []
        for label, row in rows.items():
            samples, right = sum(row.values()), row.pop(label, 0)
            others = sorted(row, key=row.__getitem__, reverse=True)[:3]
            mistakes = ", ".join(f"{self.name(other)} ({row[other]})" for other in others)
            found.append((self.name(label), samples, right / samples, mistakes))
        return sorted(found, key=lambda one: one[2])

    def lines(self) -> Iterator[str]:
        """The table by class, and with few classes the confusion matrix."""
        rows = self.by_class()
        yield "   right  samples  class, and what else it is taken for"
        yield from (
            f"{right:>8.2%} {number:>8,}  {name}: {rest or '-'}" for name, number, right, rest in rows[:MAX_ROWS]
        )
        if len(rows) > MAX_ROWS:
            yield f"... and {count(len(rows) - MAX_ROWS, 'more accurate class', 'more accurate classes')}"
        labels = sorted({label for *pair, _ in self.confusion for label in pair})
        if len(labels) <= MAX_COLUMNS:
            cells = {(label, predicted): number for label, predicted, number in self.confusion}
            yield "confusion matrix: a line for each true class, a column for each predicted one"
            yield " " * 6 + "".join(f"{label:>6}" for label in labels)
            yield from (f"{one:>6}" + "".join(f"{cells.get((one, of), '.'):>6}" for of in labels) for one in labels)


def confusion_of(outcomes: np.ndarray) -> list[tuple[int, int, int]]:
    """`Evaluation.confusion` of OUTCOME [n] (see metrics.py)."""
    pairs, numbers = np.unique([outcomes["label"], outcomes["predicted"]], axis=1, return_counts=True)
    return list(zip(*pairs.tolist(), numbers.tolist(), strict=True))


def worst_of(outcomes: np.ndarray) -> list[tuple[int, float, int, int]]:
    """`Evaluation.worst` of OUTCOME [n]."""
    worst: list[tuple[int, float, int, int]] = outcomes[
        np.argsort(-outcomes["loss"], kind="stable")[:NUM_WORST]
    ].tolist()
    return worst
