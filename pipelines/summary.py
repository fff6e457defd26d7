"""The closing words of a build: what was found, what was made of it, and how fast."""

from typing import Any

from rich.console import Console
from rich.table import Table

from pipelines.build import Result
from pipelines.config import BuildConfig


def show(config: BuildConfig, result: Result, console: Console) -> None:
    """A table of the splits and a few sentences."""
    plan = result.plan
    table = Table(title=f"{config.source}: {config.input} → {config.output}", title_justify="left")
    for column in ("split", "raw samples", "stored", "shards", "samples a shard", "MB a shard", "dropped", "repeats"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name, split in sorted(plan.splits.items()):
        small, left = divmod(split.num_stored, split.num_shards)
        each = f"{small:,}" if not left else f"{small:,} or {small + 1:,}"
        table.add_row(
            name, f"{split.num_source:,}", f"{split.num_stored:,}", f"{split.num_shards:,}", each,
            f"{split.num_bytes / split.num_shards / 1e6:,.1f}",
            f"{split.num_dropped:,}", f"{split.num_repeats:,}",
        )  # fmt: skip
    console.print(table)
    for line in sentences(config, result):
        console.print(line, highlight=False)


def sentences(config: BuildConfig, result: Result) -> list[str]:
    """What a table can't say."""
    plan, counters = result.plan, result.counters
    lines = [f"note: {note}" for note in plan.notes]
    lines += [f"fixed: {number:,} x {fix}" for fix, number in plan.fixes.items()]
    if plan.num_rejected:
        where = f": see {config.output.rstrip('/')}/{result.manifest.quarantine.path}" if result.manifest else ""
        lines.append(f"quarantined: {plan.num_rejected:,} raw samples{where}")
    if counters.get("shards_written"):
        written, size = counters.get("samples_written", 0), counters.get("bytes_written", 0)
        lines.append(
            f"wrote {counters['shards_written']:,} shards, {written:,} samples, {size / 1e6:,.1f} MB in "
            f"{result.seconds:.1f} s ({written / result.seconds:,.0f} images/s)"
        )
    if counters.get("shards_skipped"):
        lines.append(f"{counters['shards_skipped']:,} shards were finished before and stand as they should")
    lines.append(f"plan: {plan.num_units:,} units of input, {result.plan_bytes / 1e6:,.1f} MB in plan/")
    if result.manifest:
        lines.append(f"manifest: {config.output.rstrip('/')}/manifest.json, digest {result.manifest.digest[:16]}…")
    return lines


def to_json(config: BuildConfig, result: Result) -> dict[str, Any]:
    """The same for programs."""
    return {
        "output": config.output,
        "plan_digest": result.plan.digest,
        "digest": result.manifest.digest if result.manifest else None,
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
