"""Turns the rows of units into the references of shards: cuts batches by group of shards, then
sorts each group.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.plan import layout, paths, tables
from pipelines.plan.duplicate_keys import duplicate_numbers
from pipelines.plan.files import ByteRange, PlanFiles, read_slices, write_slices
from pipelines.plan.frames import REFERENCE
from pipelines.plan.layout import Placements, SplitPlan
from pipelines.plan.records import PlanFile
from pipelines.plan.summaries import UnitOffsets
from shardset.format import naming

Group = tuple[str, int]
"""A split and the number of a group of its shards."""

Run = tuple[int, int, int]
"""The number of a group or shard, and its rows [start, stop)."""

MAX_SLICE_ROWS = 2**16
"""The most rows copied at once: limits a worker's memory and the size of a slice."""


def assign_batch(
    files: PlanFiles,
    plan: PlanFile,
    batch: int,
    offsets: UnitOffsets,
    duplicate_keys: Iterable[ByteRange],
    *,
    seed: int,
    stratified: bool,
) -> list[tuple[Group, ByteRange]]:
    """Writes the references of a batch of units by group of shards; returns (group, byte range)
    pairs.

    Lists the samples that no shard stores in `plan/dropped/`.
    """
    units = plan.units_of(batch)
    unit_tables = list(tables.read_units(files, units, "split", "label", "row"))
    first_rows = np.cumsum([0, *map(len, unit_tables)])
    raw = tables.concat(unit_tables)
    unit_tables.clear()  # frees memory: concat has copied them
    number = duplicate_numbers(files, duplicate_keys, units, first_rows)
    is_stored = np.zeros(len(raw), bool)

    def slices() -> Iterator[tuple[Group, memoryview]]:
        for name, split in sorted(plan.splits.items()):
            rows = np.flatnonzero(pc.equal(raw["split"], name).to_numpy(zero_copy_only=False))
            labels, offset = raw["label"].to_numpy()[rows], offsets[name]
            for placed in layout.placements(
                labels, offset, split, seed=seed, stratified=stratified
            ):
                row = rows[placed.row]
                is_stored[row] = True
                for group, table in _by_group(split, raw, number, row, placed, offset.serial):
                    yield (name, group), tables.placements_to_bytes(table)

    written = write_slices(files, paths.slice_path("references", batch), slices())
    for unit, (start, stop) in zip(units, pairwise(first_rows.tolist()), strict=True):
        _list_dropped(files, unit, np.flatnonzero(~is_stored[start:stop]))
    return written


def plan_group(
    files: PlanFiles, split: SplitPlan, slices: Iterable[ByteRange], suffix: str = ""
) -> Iterator[int]:
    """Writes the references of every shard of a group, in their final order; yields the shard
    numbers.

    `suffix` is the suffix of the shards' folder.
    """
    placed = tables.concat(
        [tables.placements_from_bytes(data) for data in read_slices(files.output, slices)]
    )
    shard, rank, source, copy = (
        placed[name].to_numpy() for name in ("shard", "rank", "source", "copy")
    )
    order = np.lexsort((copy, source, rank, shard))  # equal ranks by source and copy
    references = tables.take(placed.select(REFERENCE.names), order)
    for number, start, stop in tables.runs_of(shard[order]):
        assert stop - start == split.shard_size(number), (
            "the arithmetic of the plan and the references agree"
        )
        # A copy: of a slice, Arrow would write up to 63 bytes more, of a row of another shard.
        table = tables.concat([references.slice(start, stop - start)])
        files.write(
            naming.references_path(split.name + suffix, number), tables.references_to_bytes(table)
        )
        yield number


def _by_group(
    split: SplitPlan,
    raw: pa.RecordBatch,
    number: np.ndarray,
    row: np.ndarray,
    placed: Placements,
    serial: int,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    group = split.group_of(placed.shard)
    # in source order within a group, so that memory is read forwards
    order = np.argsort(group, kind="stable")
    for runs in _pieces(tables.runs_of(group[order])):
        some = order[runs[0][1] : runs[-1][2]]
        rows = row.take(some)
        columns = {
            "row": pc.take(raw["row"], pa.array(rows), boundscheck=False),
            "occurrence": number.take(rows),
            "source": serial + placed.row.take(some),
            "copy": placed.copy.take(some),
            "shard": placed.shard.take(some),
            "rank": placed.rank.take(some),
        }
        table = pa.RecordBatch.from_pydict(columns, tables.PLACEMENT)
        first = runs[0][1]
        for group_number, start, stop in runs:
            yield group_number, table.slice(start - first, stop - start)


def _pieces(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Neighbouring runs with at most MAX_SLICE_ROWS rows in total; longer runs are cut."""
    piece: list[Run] = []
    for number, start, stop in runs:
        for first in range(start, stop, MAX_SLICE_ROWS):
            last = min(stop, first + MAX_SLICE_ROWS)
            if piece and last - piece[0][1] > MAX_SLICE_ROWS:
                yield piece
                piece = []
            piece.append((number, first, last))
    if piece:
        yield piece


def _list_dropped(files: PlanFiles, unit: int, rows: np.ndarray) -> None:
    if not len(rows):
        return
    [table] = tables.read_units(files, [unit])
    with files.writer(paths.dropped_path(unit)) as out:
        for row in tables.rows_of(tables.take(table, rows)):
            entry = {"split": row.split, "name": row.name, "key": row.key, "label": row.label}
            out.write(json.dumps(entry, sort_keys=True).encode() + b"\n")
