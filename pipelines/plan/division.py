"""Divides the samples of a build with --holdout, once all are indexed: equal images come into one
split, and each class into all.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipelines.holdout import Holdout
from pipelines.plan import paths, tables
from pipelines.plan.files import PlanFiles
from pipelines.plan.index import write_unit
from pipelines.plan.summaries import UnitSummary
from shardset.format.labels import NO_LABEL

Numbers = NDArray[np.uint64]


def divide(files: PlanFiles, holdout: Holdout, num_units: int) -> None:
    """Writes each unit again of which a sample moves to another split.

    The columns that decide stay as they are, so a repetition does the same. Memory holds about 60
    bytes per sample.
    """
    units = list(tables.read_units(files, range(num_units), "label", "draw", "image"))
    labels, draws, images = (column.to_numpy() for column in tables.concat(units).columns)
    splits = splits_of(holdout, draws, images, labels)
    moves = splits != _by_bounds(draws, holdout.bounds)
    stop = 0
    for unit, part in enumerate(units):
        start, stop = stop, stop + len(part)
        if not moves[start:stop].any():
            continue
        [table] = tables.read_units(files, [unit])
        summary = files.read_record(paths.summary_path(unit), UnitSummary)
        rows = [
            msgspec.structs.replace(row, split=holdout.splits[split])
            for row, split in zip(tables.rows_of(table), splits[start:stop], strict=True)
        ]
        write_unit(files, unit, rows, tables.rejected_of(table), summary.known)


def splits_of(
    holdout: Holdout, draws: Numbers, images: Numbers, labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The number of the split of each sample in `holdout.splits`.

    `draws` says where each falls alone, and samples with equal `images` fall where one of them
    does. Of the classes that lack a split then, the bounds move; a label of -1 is no class.
    """
    order = np.argsort(draws ^ images)  # neither the smallest draw nor the largest one comes first
    _, leaders, group = np.unique(images[order], return_index=True, return_inverse=True)
    together = np.empty_like(draws)
    together[order] = draws[order][leaders[group]]
    splits = _by_bounds(together, holdout.bounds)
    order = np.argsort(labels, kind="stable")
    for label, start, stop in tables.runs_of(labels[order]):
        rows = order[start:stop]
        if label != NO_LABEL and len(np.unique(splits[rows])) < len(holdout.splits):
            bounds = _bounds_within(np.unique(together[rows] / 2**64), holdout.bounds)
            splits[rows] = _by_bounds(together[rows], bounds)
    return splits


def _by_bounds(draws: Numbers, bounds: Sequence[float]) -> NDArray[np.int64]:
    return np.searchsorted(bounds, draws / 2**64, side="right")


def _bounds_within(positions: NDArray[np.float64], bounds: Sequence[float]) -> list[float]:
    """The bounds, moved as little as gives each split one of the positions; too few go to the last
    splits.
    """
    numbers = np.arange(len(bounds))
    free = np.searchsorted(positions, bounds) - numbers  # each cut is above the one before
    shifts = np.clip(np.maximum.accumulate(free), 1, len(positions) - len(bounds))
    found: list[float] = positions[np.maximum(shifts + numbers, 0)].tolist()
    return found
