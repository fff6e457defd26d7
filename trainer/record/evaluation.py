"""What `evaluate` finds by class and by sample: printed, and `evaluation.json` in the run folder."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from PIL import Image

from shardset.format.manifest import LoadedSet
from shardset.html import page
from shardset.html.page import Picture
from shardset.prepared import prepared
from shardset.program import count, printable
from shardset.stream.samples import SampleSet

EVALUATION = "evaluation.json"

NUM_WORST = 48
MAX_ROWS = 40
MAX_COLUMNS = 20
SIDE = 96
"""Pixels of a picture."""


@prepared
class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluated split. `confusion` counts samples by (label, predicted label); pairs without samples are left out.

    `worst` are the samples of highest loss, worst first, as a contact sheet shows them: (picture, key, caption).
    """

    step: int
    split: str
    classes: Sequence[str]
    confusion: list[tuple[int, int, int]]
    worst: list[tuple[Picture, str, list[str]]]

    def lines(self) -> Iterator[str]:
        """A line for each class, with its row of the confusion matrix; of many classes the least accurate ones."""
        rows: dict[int, dict[int, int]] = {}
        for label, predicted, number in self.confusion:
            rows.setdefault(label, {})[predicted] = number
        accuracy = {label: row.get(label, 0) / sum(row.values()) for label, row in rows.items()}
        labels = sorted({label for *pair, _ in self.confusion for label in pair})
        columns = labels if len(labels) <= MAX_COLUMNS else []
        yield " label    right  samples" + "".join(f"{one:>6}" for one in columns) + "  class, and what it is taken for"
        for label in sorted(rows, key=lambda one: one if columns else accuracy[one])[:MAX_ROWS]:
            row = rows[label]
            mistakes = sorted(row.keys() - {label}, key=lambda one: -row[one])[:3]
            taken_for = ", ".join(f"{name_of(other, self.classes)} ({row[other]})" for other in mistakes)
            cells = "".join(f"{row.get(one, '.'):>6}" for one in columns)
            numbers = f"{label:>6} {accuracy[label]:>8.2%} {sum(row.values()):>8,}{cells}"
            yield f"{numbers}  {name_of(label, self.classes)}: {taken_for or '-'}"
        if len(rows) > MAX_ROWS:
            yield f"... and {count(len(rows) - MAX_ROWS, 'more accurate class', 'more accurate classes')}"


def name_of(label: int, classes: Sequence[str]) -> str:
    """The name of a class; its number where it has none."""
    return printable(classes[label]) if label < len(classes) else str(label)


def confusion_of(outcomes: np.ndarray) -> list[tuple[int, int, int]]:
    """`Evaluation.confusion` of OUTCOME [n] (see metrics.py)."""
    pairs, numbers = np.unique([outcomes["label"], outcomes["predicted"]], axis=1, return_counts=True)
    return list(zip(*pairs.tolist(), numbers.tolist(), strict=True))


def worst_of(
    outcomes: np.ndarray, loaded: LoadedSet, split: str, classes: Sequence[str]
) -> list[tuple[Picture, str, list[str]]]:
    """`Evaluation.worst` of OUTCOME [n]. Reads the samples again; raises ShardsetError where that fails."""
    worst = outcomes[np.argsort(-outcomes["loss"], kind="stable")[:NUM_WORST]]
    with SampleSet(loaded, split) as samples:
        found = samples.__getitems__(worst["id"].tolist())
    sheet = []
    for sample, (_, loss, label, predicted) in zip(found, worst.tolist(), strict=True):
        image = Image.fromarray(sample.image)
        image.thumbnail((SIDE, SIDE))
        names = f"{name_of(label, classes)}, taken for {name_of(predicted, classes)}"
        sheet.append((page.picture(image), sample.key, [names, f"loss {loss:.4g}", f"{sample.key} (id {sample.id})"]))
    return sheet
