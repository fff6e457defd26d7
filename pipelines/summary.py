"""The summary of a build: what it read, what it wrote, and how fast."""

from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from pipelines.config import BuildConfig
from pipelines.split_table import of_plan, split_table
from shardset.program import count
from shardset.terminal import plain

if TYPE_CHECKING:  # Beam takes a second to import, and `estimate` draws its table without it
    from pipelines.build import Result

RATED = 10_000
"""A build of fewer images is mostly its start, so its rate says nothing."""


def show(config: BuildConfig, result: "Result", console: Console) -> None:
    """Prints a table of the splits and a few sentences."""
    stored = {}
    if result.published and not config.append:  # an append's are of all versions
        stored = {name: split.num_tar_bytes for name, split in result.published.splits.items()}
    splits = [of_plan(plan, stored.get(name)) for name, plan in sorted(result.plan.splits.items())]
    title = f"{config.source}: {config.input} → {config.output}"
    console.print(split_table(title, splits, "size" if stored else "input size"))
    for line in sentences(config, result):
        console.print(plain(line), highlight=False)


def sentences(config: BuildConfig, result: "Result") -> list[str]:
    """Sentences on notes, fixes, quarantine and speed."""
    plan, counters = result.plan, result.counters
    lines = [f"note: {note}" for note in [*plan.notes, *result.notes]]
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
        rate = f" ({written / result.seconds:,.0f} images/s)" if written >= RATED else ""
        lines.append(
            f"wrote {count(counters['shards_written'], 'shard')}, {count(written, 'sample')},"
            f" {size / 1e6:,.1f} MB in {result.seconds:.1f} s{rate}"
        )
    if counters.get("shards_skipped"):
        lines.append(f"complete already: {count(counters['shards_skipped'], 'shard')}")
    if result.published:
        version = f"version {result.published.number}, " if config.append else ""
        lines.append(
            f"manifest: {config.output.rstrip('/')}/manifest.json, {version}digest"
            f" {result.published.digest[:12]}"
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
            name: msgspec.to_builtins(of_plan(split))
            for name, split in sorted(result.plan.splits.items())
        },
        "quarantined": result.plan.num_rejected,
        "fixes": result.plan.fixes,
        "notes": result.plan.notes + result.notes,
        "counters": result.counters,
        "seconds": round(result.seconds, 3),
    }
