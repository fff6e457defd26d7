"""From the counts of all units to the plan, and from units' rows to the shards they belong to."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.images.check import TRANSPARENT
from pipelines.plan import layout, tables
from pipelines.plan.files import START_OVER
from pipelines.plan.job import BuildFile, Job, PlanFile, put, record_of
from pipelines.plan.layout import Placements, SplitPlan, UnitOffset, UnitSummary
from pipelines.plan.partitions import ByteRange, in_order, read_partitions, write_partitions, write_whole
from shardset.errors import ConfigError, NotFound, SourceError
from shardset.format import naming
from shardset.format.manifest import ClassInfo
from shardset.order.permutation import ORDER_VERSION

UnitOffsets = dict[str, UnitOffset]
Group = tuple[str, int]

KEYS, TWINS, REFERENCES = "keys", "twins", "references"
"""Kinds of parts."""

ROWS_PER_PIECE = 2**16
"""So many rows are copied at once, at most: bounds a worker's memory, and the size of a part."""

KEY = np.dtype([("hash", "<u8"), ("unit", "<u4"), ("row", "<u4")])
DUPLICATE = np.dtype([("unit", "<u4"), ("row", "<u4"), ("number", "<u4")])
"""A row whose wanted key other rows hold already, and how many of them there are before it."""


def make_plan(job: Job, build: BuildFile) -> PlanFile:
    """The plan of all splits, from the summaries of all units, written to `plan/`.

    Raises TooManyBad, SourceError (no samples) or ConfigError (sizes that can't be) before a shard is written.
    """
    config = job.config
    whole = layout.merge(read_summaries(job, build.num_units))
    layout.refuse_too_many_bad(whole, config.max_bad_fraction if config.on_bad == "quarantine" else 0.0)
    names = sorted(split for split, count in whole.splits.items() if count.num_samples)
    if not names:
        raise SourceError(f"{config.input}: no sample found; see `python -m pipelines build --help` for what is read")
    refuse_unknown_splits(config.num_shards | config.samples_per_shard | config.target_samples | config.repeat, names)
    splits = {name: _plan_split(job, name, whole) for name in names}
    _refuse_unknown_shards(config.only_shards, splits)
    classes = _classes(build, whole.max_label)
    rejected = write_whole(job.output, naming.REJECTED, _rejected_lines(job, build.num_units))
    plan = PlanFile(
        digest="",
        source_digest=whole.digest,
        num_classes=len(classes),
        classes=classes,
        splits=splits,
        fixes={fix: number for fix, number in whole.fixes.items() if fix != TRANSPARENT},
        num_rejected=sum(count.num_rejected for count in whole.splits.values()),
        rejected=rejected,
        num_units=build.num_units,
        notes=[*build.notes, *_transparency_notes(whole.fixes)],
    )
    decided = msgspec.to_builtins(plan)
    del decided["rejected"]  # the digest is older, and the same without it
    digest = _digest([decided, config.what_decides_bytes(), ORDER_VERSION])
    plan = msgspec.structs.replace(plan, digest=digest)
    job.put(naming.PLAN, msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
    return plan


def _transparency_notes(fixes: Mapping[str, int]) -> list[str]:
    number = fixes.get(TRANSPARENT, 0)
    if not number:
        return []
    images = "1 image with transparency is" if number == 1 else f"{number:,} images with transparency are"
    return [f"{images} stored as they came; the stream puts them on a background (white; image.background)"]


def unit_offsets_of(job: Job, plan: PlanFile) -> Iterator[UnitOffsets]:
    """Where the samples of each batch of units start."""
    return layout.batch_offsets(
        read_summaries(job, plan.num_units),
        plan.splits,
        at_once=plan.units_at_once,
        stratified=job.config.balance == "stratified",
    )


def read_summaries(job: Job, num_units: int) -> Iterator[UnitSummary]:
    """The summaries of all units, in unit order."""
    names = list(map(naming.summary_path, range(num_units)))
    for name, data in zip(names, in_order(job.output, names, job.read), strict=True):
        yield record_of(job.output, name, data, UnitSummary)


def spread_keys(job: Job, plan: PlanFile, batch: int) -> list[tuple[int, ByteRange]]:
    """The hashes of the keys that a batch of units wants, cut by bucket: (bucket, where its part stands)."""
    units = plan.units_of(batch)
    found = []
    for unit, data in zip(units, _read_units(job, units), strict=True):
        hashes = tables.unit_from_bytes(data, "key_hash")["key_hash"].to_numpy()
        keys = np.empty(len(hashes), KEY)
        keys["hash"], keys["unit"], keys["row"] = hashes, unit, np.arange(len(hashes))
        found.append(keys)
    keys = np.concatenate(found)
    bucket = (keys["hash"] % np.uint64(layout.num_buckets(plan.splits.values()))).astype(np.uint16)
    keys = keys[np.argsort(bucket, kind="stable")]
    parts = ((number, keys[start:stop].tobytes()) for number, start, stop in _runs(np.sort(bucket)))
    return write_partitions(job.output, naming.partition_path(KEYS, batch), parts)


def find_duplicate_keys(
    job: Job, plan: PlanFile, bucket: int, parts: Iterable[ByteRange]
) -> list[tuple[int, ByteRange]]:
    """Which rows want a key that is taken, cut by batch of units: (batch, where its part of TWINs stands).

    `parts` are all keys whose hash falls into the bucket. Nothing is written if all are different.
    """
    keys = np.concatenate([np.frombuffer(data, KEY) for data in read_partitions(job.output, sorted(parts))])
    twins = duplicates_among(keys)
    if not len(twins):
        return []
    cut = ((batch, twins[start:stop].tobytes()) for batch, start, stop in _runs(twins["unit"] // plan.units_at_once))
    return write_partitions(job.output, naming.partition_path(TWINS, bucket), cut)


def duplicates_among(keys: np.ndarray) -> np.ndarray:
    """The rows whose key others hold before them, in (unit, row) order."""
    hashes = np.sort(keys["hash"])
    taken = hashes[1:][hashes[1:] == hashes[:-1]]
    if not len(taken):
        return np.empty(0, DUPLICATE)
    keys = keys[np.isin(keys["hash"], taken)]
    keys = keys[np.lexsort((keys["row"], keys["unit"], keys["hash"]))]
    new = np.concatenate([[True], keys["hash"][1:] != keys["hash"][:-1]])
    firsts = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    twins = np.empty(len(keys), DUPLICATE)
    twins["unit"], twins["row"], twins["number"] = keys["unit"], keys["row"], np.arange(len(keys)) - firsts
    return np.sort(twins[~new], order=["unit", "row"])


def assign_batch(
    job: Job, plan: PlanFile, batch: int, starts: UnitOffsets, twins: Iterable[ByteRange]
) -> list[tuple[Group, ByteRange]]:
    """The references of a batch of units, cut by group of shards: ((split, group), where its part stands).

    Samples that are stored nowhere are listed in `plan/dropped/`.
    """
    units = plan.units_of(batch)
    found = [tables.unit_from_bytes(data, "split", "label", "row") for data in _read_units(job, units)]
    firsts = np.cumsum([0, *map(len, found)])
    raw = tables.concat(found)
    found.clear()
    twin = _twin_numbers(job, twins, units, firsts, len(raw))
    stored = np.zeros(len(raw), bool)
    parts = write_partitions(
        job.output, naming.partition_path(REFERENCES, batch), _cut(job, plan, raw, twin, starts, stored)
    )
    for unit, (first, stop) in zip(units, pairwise(firsts.tolist()), strict=True):
        dropped = np.flatnonzero(~stored[first:stop])
        if len(dropped):
            [table] = map(tables.unit_from_bytes, _read_units(job, [unit]))
            put(job.output, naming.dropped_path(unit), b"".join(_dropped_lines(table, dropped)))
    return parts


def plan_group(job: Job, plan: SplitPlan, parts: Iterable[ByteRange]) -> Iterator[int]:
    """Writes the references of every shard of one group, in their final order; yields the shard numbers."""
    placed = tables.concat([tables.placements_from_bytes(data) for data in read_partitions(job.output, sorted(parts))])
    shard, rank, source, copy = (placed[name].to_numpy() for name in ("shard", "rank", "source", "copy"))
    order = layout.rank_order(shard, rank, source, copy)
    references = tables.take(placed.select(tables.REFERENCE.names), order)
    runs = list(_runs(shard[order]))
    for (number, start, stop), mine in zip(runs, tables.slices(references, _bounds(runs)), strict=True):
        assert stop - start == plan.shard_size(number), "the arithmetic of the plan and the references agree"
        job.put(naming.references_path(plan.name, number), tables.references_to_bytes(mine))
        yield number


def _cut(
    job: Job, plan: PlanFile, raw: pa.RecordBatch, twin: np.ndarray, starts: UnitOffsets, stored: np.ndarray
) -> Iterator[tuple[Group, memoryview]]:
    """The references of all rows as parts; marks in `stored` which rows have any."""
    labels = raw["label"].to_numpy()
    for name, split in sorted(plan.splits.items()):
        mine = np.flatnonzero(pc.equal(raw["split"], name).to_numpy(zero_copy_only=False))
        for places in _places(job, split, labels[mine], starts[name]):
            row = mine[places.row]
            stored[row] = True
            for group, placed in _by_group(split, raw, twin, row, places, starts[name].serial):
                yield (name, group), tables.placements_to_bytes(placed)


def _places(job: Job, plan: SplitPlan, labels: np.ndarray, start: UnitOffset) -> Iterator[Placements]:
    stratified = job.config.balance == "stratified"
    return layout.placements(labels, start, plan, seed=job.config.seed, stratified=stratified)


def _by_group(
    plan: SplitPlan, raw: pa.RecordBatch, twin: np.ndarray, row: np.ndarray, places: Placements, serial: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    group = plan.group_of(places.shard)
    order = layout.by_shard(group)  # in source order within a group: memory is read forwards
    for runs in _pieces(_runs(group[order])):
        mine = order[runs[0][1] : runs[-1][2]]
        rows = row.take(mine)
        columns = {
            "row": pc.take(raw["row"], pa.array(rows), boundscheck=False),
            "twin": twin.take(rows),
            "source": serial + places.row.take(mine),
            "copy": places.copy.take(mine),
            "shard": places.shard.take(mine),
            "rank": places.rank.take(mine),
        }
        placed = tables.from_columns(tables.PLACEMENT, columns)
        yield from zip((number for number, _, _ in runs), tables.slices(placed, _bounds(runs)), strict=True)


def _pieces(runs: Iterable[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Neighbouring runs of together at most ROWS_PER_PIECE rows; longer runs are cut."""
    piece: list[tuple[int, int, int]] = []
    for number, start, stop in runs:
        for first in range(start, stop, ROWS_PER_PIECE):
            last = min(stop, first + ROWS_PER_PIECE)
            if piece and last - piece[0][1] > ROWS_PER_PIECE:
                yield piece
                piece = []
            piece.append((number, first, last))
    if piece:
        yield piece


def _runs(values: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(value, start, stop) of each run of equal values."""
    bounds = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for start, stop in pairwise(bounds if len(values) else ()):
        yield int(values[start]), start, stop


def _bounds(runs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Where neighbouring runs are cut, from the start of the first."""
    first = runs[0][1]
    return [0, *(stop - first for _, _, stop in runs)]


def _read_units(job: Job, units: Iterable[int]) -> Iterator[memoryview]:
    """The tables of units, as they are stored; ConfigError if one is gone."""
    try:
        yield from in_order(job.output, map(naming.unit_path, units), job.read)
    except NotFound as error:
        raise ConfigError(f"a table of the plan is missing ({error}): {START_OVER}") from error


def _twin_numbers(job: Job, parts: Iterable[ByteRange], units: range, firsts: np.ndarray, num_rows: int) -> np.ndarray:
    """For each row of a batch how many others hold its wanted key before it."""
    numbers = np.zeros(num_rows, np.int64)
    for data in read_partitions(job.output, sorted(parts)):
        twins = np.frombuffer(data, DUPLICATE)
        numbers[firsts[twins["unit"] - units.start] + twins["row"]] = twins["number"]
    return numbers


def _plan_split(job: Job, name: str, whole: UnitSummary) -> SplitPlan:
    count = whole.splits[name]
    return layout.plan_split(
        name,
        count.strata,
        num_bytes=count.num_bytes,
        fields=whole.fields.get(name, ()),
        sizing=job.config.sizing(name),
        balance=job.config.balance,
    )


def _dropped_lines(table: pa.RecordBatch, rows: np.ndarray) -> Iterator[bytes]:
    for row in tables.rows_of(tables.take(table, rows)):
        found = {"split": row.split, "name": row.name, "key": row.key, "label": row.label}
        yield json.dumps(found, sort_keys=True).encode() + b"\n"


def _classes(build: BuildFile, largest: int) -> list[ClassInfo]:
    if build.classes is None:
        return [ClassInfo(label=label, name=str(label)) for label in range(largest + 1)]
    if largest >= len(build.classes):
        raise SourceError(f"label {largest} was found, but there are {len(build.classes)} classes; check the labels")
    return build.classes


def refuse_unknown_splits(wanted: Iterable[str], names: Sequence[str]) -> None:
    """Raises ConfigError if sizes are asked for splits that the input does not have."""
    unknown = sorted({*wanted} - {*names, ""})
    if unknown:
        raise ConfigError(f"sizes were given for split {unknown[0]!r}, but the input has {', '.join(names)}")


def _refuse_unknown_shards(wanted: Iterable[tuple[str, int]], splits: dict[str, SplitPlan]) -> None:
    for name, number in sorted(wanted):
        if name not in splits:
            raise ConfigError(f"--only-shards {name}:{number}: there is no such split, only {', '.join(splits)}")
        if number >= splits[name].num_shards:
            raise ConfigError(
                f"--only-shards {name}:{number}: split {name!r} has shards 0 to {splits[name].num_shards - 1}"
            )


def _rejected_lines(job: Job, num_units: int) -> Iterator[bytes]:
    for summary in read_summaries(job, num_units):
        if any(count.num_rejected for count in summary.splits.values()):
            [table] = map(tables.unit_from_bytes, _read_units(job, [summary.unit]))
            for entry in tables.rejected_of(table):
                yield json.dumps(entry, sort_keys=True).encode() + b"\n"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
