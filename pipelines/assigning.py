"""From the counts of all units to the plan, and from a unit's rows to the shards they belong to."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from pipelines import planning, tables
from pipelines.job import BuildFile, Job, PlanFile, put
from pipelines.planning import Places, SplitPlan, UnitStart, UnitSummary
from shardset import naming
from shardset.errors import ConfigError, SourceError
from shardset.manifest import ClassInfo
from shardset.permutation import ORDER_VERSION

Starts = dict[str, UnitStart]
Twins = dict[int, int]
"""The rows of a unit whose wanted key another row holds already, and how many hold it before them."""


def make_plan(job: Job, build: BuildFile, summaries: Sequence[UnitSummary]) -> tuple[PlanFile, list[Starts]]:
    """The plan of all splits, written to `plan/`, and where each unit's samples start.

    Raises TooManyBad, SourceError (no samples) or ConfigError (sizes that can't be) before a shard is written.
    """
    summaries = sorted(summaries, key=lambda summary: summary.unit)
    config = job.config
    allowed = config.max_bad_fraction if config.on_bad == "quarantine" else 0.0
    planning.refuse_too_many_bad(summaries, allowed)
    names = sorted({split for summary in summaries for split, count in summary.splits.items() if count.num_samples})
    if not names:
        raise SourceError(f"{config.input}: no sample found; see `python -m pipelines build --help` for what is read")
    refuse_unknown_splits(config.num_shards | config.samples_per_shard | config.target_samples | config.repeat, names)
    splits = {name: _plan_split(job, name, summaries) for name in names}
    _refuse_unknown_shards(config.only_shards, splits)
    draft = PlanFile(
        digest="",
        source_digest=_digest([summary.digest for summary in summaries]),
        classes=_classes(build, summaries),
        splits=splits,
        fixes=_sum_fixes(summaries),
        num_rejected=sum(count.num_rejected for summary in summaries for count in summary.splits.values()),
        num_units=len(summaries),
        spooled=any(summary.spooled for summary in summaries),
        notes=build.notes,
    )
    digest = _digest([msgspec.to_builtins(draft), config.what_decides_bytes(), ORDER_VERSION])
    plan = msgspec.structs.replace(draft, digest=digest)
    put(job.output, naming.REJECTED, b"".join(_rejected_lines(job, summaries)))
    put(job.output, naming.PLAN, msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
    return plan, planning.unit_starts(summaries, stratified=config.balance == "stratified")


def assign_units(
    job: Job, plan: PlanFile, units: Iterable[tuple[int, Starts, Twins]]
) -> Iterator[tuple[tuple[str, int], pa.Table]]:
    """The stored samples of some units, cut by (split, group of shards); (unit, where it starts, its twins) each."""
    columns: dict[str, list[dict[str, np.ndarray]]] = {split: [] for split in sorted(plan.splits)}
    unit_tables, first_row = [], 0
    for unit, starts, twins in units:
        table = tables.from_bytes(job.output.read(naming.unit_path(unit)))
        splits = np.array(table["split"].to_pylist(), dtype=object)
        stored = np.zeros(len(splits), bool)
        for split in columns:
            rows = np.flatnonzero(splits == split)
            if len(rows):
                places = _places(job, plan.splits[split], table, rows, starts[split])
                stored[rows[places.row]] = True
                columns[split].append(_columns(places, first_row + rows[places.row], starts[split].serial))
        if not stored.all():
            put(job.output, naming.dropped_path(unit), b"".join(_dropped_lines(table, np.flatnonzero(~stored))))
        unit_tables.append(_with_final_keys(table.replace_schema_metadata(None), splits, twins))
        first_row += len(table)
    raw = pa.concat_tables(unit_tables)
    for split, found in columns.items():
        if found:
            yield from _cut_by_group(plan.splits[split], raw, found)


def find_twins(parts: Iterable[tuple[int, np.ndarray]]) -> dict[int, Twins]:
    """Which rows want a key that is taken: unit -> row -> how many hold it before, in (unit, row) order.

    `parts` are (unit, array [n, 2] of (key hash, row)), all of those whose hash falls into one bucket.
    """
    parts = list(parts)
    hashes = np.concatenate([part[:, 0] for _, part in parts])
    rows = np.concatenate([part[:, 1] for _, part in parts])
    units = np.concatenate([np.full(len(part), unit, np.uint64) for unit, part in parts])
    order = np.lexsort((rows, units, hashes))
    hashes, rows, units = hashes[order], rows[order], units[order]
    new = np.concatenate([[True], hashes[1:] != hashes[:-1]])
    firsts = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    found: dict[int, Twins] = {}
    for place in np.flatnonzero(~new).tolist():
        found.setdefault(int(units[place]), {})[int(rows[place])] = place - int(firsts[place])
    return found


def plan_shards(job: Job, plan: SplitPlan, parts: Iterable[pa.Table]) -> Iterator[int]:
    """Writes the references of every shard of one group, in their final order; yields the shard numbers."""
    table = pa.concat_tables(parts).combine_chunks()
    shard = tables.numbers(table, "shard")
    order = planning.rank_order(
        shard, tables.numbers(table, "rank"), tables.numbers(table, "source"), tables.numbers(table, "copy")
    )
    numbers, firsts = np.unique(shard[order], return_index=True)
    for number, start, stop in zip(numbers.tolist(), firsts, [*firsts[1:], len(shard)], strict=True):
        assert stop - start == plan.shard_size(number), "the arithmetic of the plan and the references agree"
        mine = table.take(pa.array(order[start:stop]))
        put(job.output, naming.references_path(plan.name, number), tables.to_bytes(mine))
        yield number


def _plan_split(job: Job, name: str, summaries: Sequence[UnitSummary]) -> SplitPlan:
    return planning.plan_split(
        name,
        planning.sum_strata(summaries, name),
        num_bytes=sum(summary.splits[name].num_bytes for summary in summaries if name in summary.splits),
        fields=planning.merge_fields(summaries, name),
        sizing=job.config.sizing(name),
        balance=job.config.balance,
    )


def _places(job: Job, plan: SplitPlan, table: pa.Table, rows: np.ndarray, start: UnitStart) -> Places:
    labels = tables.numbers(table, "label")[rows]
    return planning.place(labels, start, plan, seed=job.config.seed, stratified=job.config.balance == "stratified")


def _dropped_lines(table: pa.Table, rows: np.ndarray) -> Iterator[bytes]:
    for row in table.select(["split", "name", "key", "label"]).take(pa.array(rows)).to_pylist():
        yield json.dumps(row, sort_keys=True).encode() + b"\n"


def _columns(places: Places, row: np.ndarray, serial: int) -> dict[str, np.ndarray]:
    return {
        "row": row,
        "source": serial + places.row,
        "copy": places.copy,
        "shard": places.shard,
        "rank": places.rank,
    }


def _cut_by_group(
    plan: SplitPlan, raw: pa.Table, found: Sequence[dict[str, np.ndarray]]
) -> Iterator[tuple[tuple[str, int], pa.Table]]:
    columns = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    group = plan.group_of(columns["shard"])
    order = np.argsort(group, kind="stable")
    for first in range(0, len(order), planning.ROWS_AT_ONCE):
        mine = order[first : first + planning.ROWS_AT_ONCE]
        table = _place_rows(raw, {name: column[mine] for name, column in columns.items()})
        numbers, firsts = np.unique(group[mine], return_index=True)
        for number, start, stop in zip(numbers.tolist(), firsts, [*firsts[1:], len(mine)], strict=True):
            yield (plan.name, number), table.slice(start, stop - start)


def _place_rows(raw: pa.Table, columns: dict[str, np.ndarray]) -> pa.Table:
    table = tables.place_rows(raw, columns["row"], columns)
    if not columns["copy"].any():
        return table
    copies = zip(table["key"].to_pylist(), columns["copy"].tolist(), strict=True)
    return tables.with_keys(table, [naming.copy_key(key, copy) for key, copy in copies])


def _with_final_keys(table: pa.Table, splits: np.ndarray, twins: Twins) -> pa.Table:
    rows = sorted({*tables.no_keys(table).tolist(), *twins})
    if not rows:
        return table
    keys, names = table["key"].to_pylist(), table["name"]
    for row in rows:
        keys[row] = final_key(splits[row], names[row].as_py(), keys[row], twins.get(row))
    return tables.with_keys(table, keys)


def final_key(split: str, name: str, wanted: str, twin: int | None) -> str:
    """The wanted key if it can be one and is free, else a short one made from the original name."""
    if twin is None and naming.is_key(wanted):
        return wanted
    return naming.short_key(f"{split}/{name}", twin or 0)


def _classes(build: BuildFile, summaries: Sequence[UnitSummary]) -> list[ClassInfo]:
    largest = max(summary.max_label for summary in summaries)
    if build.classes is None:
        return [ClassInfo(label=label, name=str(label)) for label in range(largest + 1)]
    if largest >= len(build.classes):
        raise SourceError(f"label {largest} was found, but there are {len(build.classes)} classes; check the labels")
    return build.classes


def refuse_unknown_splits(wanted: Iterable[str], names: Sequence[str]) -> None:
    """Raises SourceError if sizes are asked for splits that the input does not have."""
    unknown = sorted({*wanted} - {*names, ""})
    if unknown:
        raise SourceError(f"sizes were given for split {unknown[0]!r}, but the input has {', '.join(names)}")


def _refuse_unknown_shards(wanted: Iterable[tuple[str, int]], splits: dict[str, SplitPlan]) -> None:
    for name, number in sorted(wanted):
        if name not in splits:
            raise ConfigError(f"--only-shards {name}:{number}: there is no such split, only {', '.join(splits)}")
        if number >= splits[name].num_shards:
            raise ConfigError(
                f"--only-shards {name}:{number}: split {name!r} has shards 0 to {splits[name].num_shards - 1}"
            )


def _sum_fixes(summaries: Sequence[UnitSummary]) -> dict[str, int]:
    names = sorted({name for summary in summaries for name in summary.fixes})
    return {name: sum(summary.fixes.get(name, 0) for summary in summaries) for name in names}


def _rejected_lines(job: Job, summaries: Sequence[UnitSummary]) -> Iterator[bytes]:
    for summary in summaries:
        if any(count.num_rejected for count in summary.splits.values()):
            table = tables.from_bytes(job.output.read(naming.unit_path(summary.unit)))
            for entry in tables.rejected_of(table):
                yield json.dumps(entry, sort_keys=True).encode() + b"\n"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
