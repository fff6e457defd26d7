"""What `evaluate` finds by class and by sample."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from PIL import Image
from rich.table import Table

from shardset.format.manifest import LoadedSet
from shardset.html import page
from shardset.html.page import Picture
from shardset.stream.samples import SampleSet
from shardset.terminal import table

WORST = "worst.json"
"""The samples of highest loss in the newest evaluation of a run folder: see `worst_of`."""

NUM_WORST = 48
SIDE = 96
"""Pixels of a picture."""

Worst = list[tuple[Picture, str, list[str]]]
"""Samples as a contact sheet shows them: (picture, key, lines of the caption)."""


def by_class(outcomes: np.ndarray, names: Sequence[str]) -> Table:
    """Of OUTCOME [n] (see step_rows.py) the accuracy of each class, the least accurate first, and
    its three most frequent mistakes.
    """
    rows: dict[int, Counter[int]] = defaultdict(Counter)
    for label, predicted in outcomes[["label", "predicted"]].tolist():
        rows[label][predicted] += 1
    accuracy = {label: row[label] / row.total() for label, row in rows.items()}
    cells = []
    for label in sorted(rows, key=lambda label: (accuracy[label], label)):
        row = rows[label]
        others = sorted(row.keys() - {label}, key=lambda other: (-row[other], other))[:3]
        mistakes = ", ".join(f"{names[other]} ({row[other]})" for other in others)
        cells.append((f"{accuracy[label]:.2%}", row.total(), label, names[label], mistakes))
    columns = ["right#", "samples#", "label#", "class", "mistakes"]
    return table("", columns, cells, "more accurate")


def worst_of(outcomes: np.ndarray, loaded: LoadedSet, split: str, names: Sequence[str]) -> Worst:
    """The samples of highest loss of OUTCOME [n], worst first.

    Reads them again; raises ShardsetError.
    """
    worst = outcomes[np.argsort(-outcomes["loss"], kind="stable")[:NUM_WORST]]
    with SampleSet(loaded, split) as samples:
        images = samples.__getitems__(samples.view.selection.num_before(worst["id"]).tolist())
    sheet = []
    for sample, (_, loss, label, predicted) in zip(images, worst.tolist(), strict=True):
        image = Image.fromarray(sample.image)
        image.thumbnail((SIDE, SIDE))
        caption = [
            f"{names[label]}, taken for {names[predicted]}",
            f"loss {loss:.4g}",
            f"{sample.key} (id {sample.id})",
        ]
        sheet.append((page.picture(image), sample.key, caption))
    return sheet
