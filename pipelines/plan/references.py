"""The references of each shard: the rows of its samples, in their final order.

A worker reads the tables of all units for a group of shards, and keeps the rows that belong there.
So memory holds a group, and nothing but the name of a group goes through the runner.
"""

import json
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.plan import layout, paths, tables
from pipelines.plan.layout import Placements
from pipelines.plan.plan_records import Build, PlanFile
from shardset.format import naming

Group = tuple[str, int]
"""A split and the number of a group of its shards."""

Slot = tuple[str, int]
"""A split and the number of one of its shards."""

BATCH_ROWS = 2**17
"""The rows of small units are placed together: about as many as fit the CPU cache."""

_PLACED = pa.schema([*tables.REFERENCE, ("shard", pa.int32()), ("rank", pa.uint64())])
_COLUMNS = [name for name in tables.REFERENCE.names if name in tables.UNIT.names]


def groups_of(build: Build, plan: PlanFile) -> list[Group]:
    """The groups with wanted shards, in order."""
    config, groups = build.config, set[Group]()
    for name, split in plan.splits.items():
        wanted = [number for other, number in config.only_shards if other == name]
        shards = np.array(wanted, int) if config.only_shards else np.arange(split.num_shards)
        groups |= {(name, number) for number in np.unique(split.group_of(shards)).tolist()}
    return sorted(groups)


def write_references(build: Build, plan: PlanFile, group: Group) -> list[Slot]:
    """Writes the references of the wanted shards of a group, and returns these.

    The first group of a split also lists the samples
    that no shard stores.
    """
    name, number = group
    split, wanted = plan.splits[name], build.config.only_shards
    if split.num_dropped and number == 0:
        _list_dropped(build, plan, name)
    pieces = []
    for table, rows, placed in _placed(build, plan, name):
        mine = np.flatnonzero(split.group_of(placed.shard) == number)
        columns = {
            "serial": placed.serial[mine],
            "copy": placed.copy[mine],
            "shard": placed.shard[mine],
            "rank": placed.rank[mine],
        }
        taken = tables.take(table, rows[placed.row[mine]])
        pieces.append(tables.with_columns(taken, columns, _PLACED))
    references = tables.concat(pieces)
    pieces.clear()  # frees memory: concat has copied them
    shard, rank, serial, copy = (
        references[column].to_numpy() for column in ("shard", "rank", "serial", "copy")
    )
    order = np.lexsort((copy, serial, rank, shard))  # equal ranks by serial and copy
    references = references.select(tables.REFERENCE.names)
    slots = []
    for number, start, stop in tables.runs_of(shard[order]):
        assert stop - start == split.shard_size(number), "the plan and the references agree"
        slot = name, number
        if wanted and slot not in wanted:
            continue
        content = tables.to_bytes(tables.take(references, order[start:stop]))
        tar = naming.shard_path(name + build.file.suffix, name, number)
        build.files.write(paths.references_path(tar), content)
        slots.append(slot)
    return slots


def _placed(
    build: Build, plan: PlanFile, name: str
) -> Iterator[tuple[pa.RecordBatch, np.ndarray, Placements]]:
    """The samples of a split in pieces, in source order: a table, the rows of some samples in it,
    and the placements of these.
    """
    config, split, before = build.config, plan.splits[name], Counter[int]()
    for table in _batches(tables.read_units(build.files, range(plan.num_units), *_COLUMNS)):
        in_split = pc.equal(table["split"], name).to_numpy(zero_copy_only=False)
        all_rows = np.flatnonzero(in_split)
        labels = table["label"].to_numpy()
        for first in range(0, len(all_rows), split.max_placed):
            rows = all_rows[first : first + split.max_placed]
            strata = labels[rows] if config.stratified else np.zeros(len(rows), np.int64)
            yield table, rows, layout.place(strata, before, split, seed=config.seed)
            numbers, counts = np.unique(strata, return_counts=True)
            before.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


def _batches(unit_tables: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The tables, small ones together."""
    batch: list[pa.RecordBatch] = []
    for table in unit_tables:
        batch.append(table)
        if sum(map(len, batch)) >= BATCH_ROWS:
            yield tables.concat(batch)
            batch = []
    if batch:
        yield tables.concat(batch)


def _list_dropped(build: Build, plan: PlanFile, name: str) -> None:
    with build.files.writer(paths.dropped_path(name)) as out:
        for table, rows, placed in _placed(build, plan, name):
            dropped = np.delete(rows, np.unique(placed.row))
            for row in tables.rows_of(tables.take(table, dropped)):
                entry = {"split": name, "name": row.name, "key": row.key, "label": row.label}
                out.write(json.dumps(entry, sort_keys=True).encode() + b"\n")
