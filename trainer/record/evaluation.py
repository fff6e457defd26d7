"""What `evaluate` finds by class and by sample."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from shardset.errors import printable
from shardset.format.manifest import LoadedSet
from shardset.html import page
from shardset.html.page import Picture
from shardset.program import count
from shardset.stream.samples import SampleSet

WORST = "worst.json"
"""The samples of highest loss in the newest evaluation of a run folder: see `worst_of`."""

NUM_WORST = 48
MAX_ROWS, MAX_COLUMNS = 40, 20
SIDE = 96
"""Pixels of a picture."""

Worst = list[tuple[Picture, str, list[str]]]
"""Samples as a contact sheet shows them: (picture, key, lines of the caption)."""


def lines_by_class(outcomes: np.ndarray, names: Sequence[str]) -> Iterator[str]:
    """Of OUTCOME [n] (see data/rows.py) the accuracy of each class and its row of the confusion
    matrix.

    Where the classes are many, the least accurate ones, with their three most frequent mistakes.
    """
    rows: dict[int, Counter[int]] = defaultdict(Counter)
    for label, predicted in outcomes[["label", "predicted"]].tolist():
        rows[label][predicted] += 1
    accuracy = {label: row[label] / row.total() for label, row in rows.items()}
    labels = sorted(rows.keys() | {predicted for row in rows.values() for predicted in row})
    is_matrix = len(labels) <= MAX_COLUMNS
    columns = (
        "".join(f"{one:>6}" for one in labels) + "  predicted as"
        if is_matrix
        else "  class: mistakes"
    )
    yield f"{'right':>8}{'samples':>9}{columns}"
    for label in sorted(rows, key=lambda one: one if is_matrix else accuracy[one])[:MAX_ROWS]:
        row, text = rows[label], f"  {label} {printable(names[label])}"
        if is_matrix:
            text = "".join(f"{row[one] or '.':>6}" for one in labels) + text
        else:
            mistakes = [one for one, _ in row.most_common(4) if one != label][:3]
            text += ": " + ", ".join(f"{printable(names[one])} ({row[one]})" for one in mistakes)
        yield f"{accuracy[label]:>8.2%}{row.total():>9,}{text}"
    if len(rows) > MAX_ROWS:
        yield (
            f"... and {count(len(rows) - MAX_ROWS, 'more accurate class', 'more accurate classes')}"
        )


def worst_of(outcomes: np.ndarray, loaded: LoadedSet, split: str, names: Sequence[str]) -> Worst:
    """The samples of highest loss of OUTCOME [n], worst first.

    Reads them again; raises ShardsetError.
    """
    worst = outcomes[np.argsort(-outcomes["loss"], kind="stable")[:NUM_WORST]]
    with SampleSet(loaded, split) as samples:
        found = samples.__getitems__(samples.view.selection.num_before(worst["id"]).tolist())
    sheet = []
    for sample, (_, loss, label, predicted) in zip(found, worst.tolist(), strict=True):
        image = Image.fromarray(sample.image)
        image.thumbnail((SIDE, SIDE))
        caption = [
            f"{names[label]}, taken for {names[predicted]}",
            f"loss {loss:.4g}",
            f"{sample.key} (id {sample.id})",
        ]
        sheet.append((page.picture(image), sample.key, caption))
    return sheet
