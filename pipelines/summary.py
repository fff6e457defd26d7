"""The summary of a build: what it read, what it wrote, and how fast."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipelines.config import BuildConfig
from pipelines.plan import files, paths
from pipelines.plan.layout import SplitPlan
from pipelines.plan.records import BuildFile
from pipelines.terminal import plain
from shardset.program import count
from shardset.storage.open import open_storage

if TYPE_CHECKING:  # Beam takes a second to import, and `estimate` draws its table without it
    from pipelines.build import Result


def show(config: BuildConfig, result: "Result", console: Console) -> None:
    """Prints a table of the splits and a few sentences."""
    plans = [split for _, split in sorted(result.plan.splits.items())]
    title, stored = (
        f"{config.source}: {config.input} → {config.output}",
        stored_bytes(config, result),
    )
    plans = [replace(plan, num_bytes=stored.get(plan.name, plan.num_bytes)) for plan in plans]
    console.print(split_table(title, plans, "MB each" if stored else "input MB each"))
    for line in sentences(config, result):
        console.print(plain(line), highlight=False)


def stored_bytes(config: BuildConfig, result: "Result") -> dict[str, int]:
    """The bytes of the tars of each split of a published set."""
    # Listed, because a manifest may be too large to load.
    if result.published is None:
        return {}
    output = open_storage(config.output)
    build = files.find_record(output, paths.BUILD, BuildFile)
    folders = {name: f"{name}{build.suffix if build else ''}/" for name in result.plan.splits}
    return {
        name: sum(stat.num_bytes for stat in output.list(folder) if stat.name.endswith(".tar"))
        for name, folder in folders.items()
    }


def split_table(title: str, plans: Iterable[SplitPlan], size: str = "MB each") -> Table:
    """A row for each split with its samples and shards,
    without the columns that are 0 everywhere.
    """
    plans = list(plans)
    table = Table(
        title=plain(title, style="table.title"),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("split", no_wrap=True, overflow="fold")
    columns = ["raw", "stored", "shards", "samples each", size]
    optional = [
        name
        for name in ("dropped", "repeats")
        if any(getattr(plan, f"num_{name}") for plan in plans)
    ]
    for column in [*columns, *optional]:
        table.add_column(column, justify="right", no_wrap=True)
    for plan in plans:
        small, remainder = divmod(plan.num_stored, plan.num_shards)
        each = f"{small:,}" if not remainder else f"{small:,} or {small + 1:,}"
        table.add_row(
            plan.name, f"{plan.num_source:,}", f"{plan.num_stored:,}", f"{plan.num_shards:,}", each,
            f"{plan.num_bytes / plan.num_shards / 1e6:,.1f}",
            *(f"{getattr(plan, f'num_{name}'):,}" for name in optional),
        )  # fmt: skip
    return table


def sentences(config: BuildConfig, result: "Result") -> list[str]:
    """Sentences on notes, fixes, quarantine and speed."""
    plan, counters = result.plan, result.counters
    lines = [f"note: {note}" for note in plan.notes]
    lines += [f"fixed: {number:,} x {fix}" for fix, number in plan.fixes.items()]
    if plan.num_rejected:
        where = (
            f": see {config.output.rstrip('/')}/{result.published.quarantine.path}"
            if result.published
            else ""
        )
        lines.append(f"quarantined: {count(plan.num_rejected, 'raw sample')}{where}")
        lines += [f"  {rejected}" for rejected in result.rejected]
        more = plan.num_rejected - len(result.rejected)
        lines += [f"  and {more:,} more"] if result.rejected and more else []
    if counters.get("shards_written"):
        written, size = counters.get("samples_written", 0), counters.get("bytes_written", 0)
        lines.append(
            f"wrote {count(counters['shards_written'], 'shard')}, {count(written, 'sample')},"
            f" {size / 1e6:,.1f} MB in {result.seconds:.1f} s ({written / result.seconds:,.0f}"
            " images/s)"
        )
    if counters.get("shards_skipped"):
        lines.append(f"complete already: {count(counters['shards_skipped'], 'shard')}")
    lines.append(
        f"plan: {count(plan.num_units, 'unit')} of input, {result.plan_bytes / 1e6:,.1f} MB in"
        " plan/"
    )
    if result.published:
        version = f"version {result.published.number}, " if config.append else ""
        lines.append(
            f"manifest: {config.output.rstrip('/')}/manifest.json, {version}digest"
            f" {result.published.digest[:16]}…"
        )
    return lines


def to_json(config: BuildConfig, result: "Result") -> dict[str, Any]:
    """The summary as JSON."""
    return {
        "output": config.output,
        "plan_digest": result.plan.digest,
        "digest": result.published.digest if result.published else None,
        "version": result.published.number if result.published else None,
        "splits": {
            name: {
                "num_source_samples": split.num_source,
                "num_samples": split.num_stored,
                "num_shards": split.num_shards,
                "num_dropped": split.num_dropped,
                "num_repeats": split.num_repeats,
            }
            for name, split in sorted(result.plan.splits.items())
        },
        "quarantined": result.plan.num_rejected,
        "fixes": result.plan.fixes,
        "notes": result.plan.notes,
        "counters": result.counters,
        "seconds": round(result.seconds, 3),
    }
