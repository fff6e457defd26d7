"""The output of `plan`: a table of 80 columns, or JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.estimate import ramp
from pipelines.estimate.model import Estimate
from pipelines.estimate.prices import Prices
from pipelines.estimate.requests import ReadEstimate
from pipelines.estimate.stored import StoredSplit
from pipelines.write import summary
from shardset.order.budget import Memory

_ON_SIZES = frozenset(
    ("splits", "manifest_bytes", "stored_bytes", "order", "mixing", "reads", "cold_start", "memory", "build", "dollars",
     "advice", "refusals")
)  # fmt: skip
"""Fields of the JSON that depend on the sizes of samples, which are assumptions for bare numbers."""


def show(estimate: Estimate, console: Console) -> None:
    """Prints the splits, what reading one of them takes, advice, and the assumption behind the marked numbers."""
    title = estimate.stored.title + _mark(estimate, "splits")
    console.print(summary.split_table(title, [split.plan for split in estimate.stored.splits.values()]))
    console.print(f"\n{_heading(estimate)}", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for field, name, text in _rows(estimate):
        table.add_row(name + _mark(estimate, field), Text(text))
    console.print(table)
    for sentence in estimate.advice:
        console.print(Text(f"\n- {sentence}{_mark(estimate, 'advice')}"))
    for sentence in estimate.refusals:
        console.print(Text(f"\nrefused: {sentence}{_mark(estimate, 'refusals')}", style="bold red"))
    if estimate.stored.assumption:
        console.print(Text(f"\n* assumed: {estimate.stored.assumption}."))


def _mark(estimate: Estimate, field: str) -> str:
    return " *" if estimate.stored.assumption and field in _ON_SIZES else ""


def _heading(estimate: Estimate) -> str:
    reading = estimate.reading
    replicas, hosts = _count(reading.num_replicas, "replica"), _count(reading.num_hosts, "host")
    readers = f"{reading.strategy}: {_count(reading.num_readers, 'reader')}"
    return f"{estimate.split}, read in batches of {reading.global_batch_size:,} by {replicas} on {hosts} ({readers})"


def _rows(estimate: Estimate) -> Iterator[tuple[str, str, str]]:
    """(field of the JSON, name, text) for each row of the second table."""
    about = "about " if estimate.stored.assumption else ""
    yield from _order_rows(estimate)
    if cold := estimate.cold:
        text = (
            f"{about}{_size(cold.num_bytes)} before the first batch: {_size(cold.manifest_bytes)} manifest, "
            f"{_size(cold.index_bytes)} indexes, {_size(cold.sample_bytes)} samples; "
            f"{_size(cold.num_bytes / estimate.reading.num_readers)} a reader"
        )
        yield "cold_start", "cold start", text
    if reads := estimate.reads:
        yield "reads", "requests", _requests(reads, estimate.prices)
        text = (
            f"{about}{_size(reads.num_bytes)} of samples in the first epoch, amplification {reads.amplification:.3f}; "
            f"{_size(reads.index_bytes)} of indexes"
        )
        yield "reads", "bytes read", text
    if estimate.memory:
        yield "memory", "memory", _memory(estimate.memory, estimate.reading.readers_per_host)
    yield from _cost_rows(estimate, about)


def _order_rows(estimate: Estimate) -> Iterator[tuple[str, str, str]]:
    order, steps = estimate.order, estimate.steps
    last = f", the last with {steps.num_last:,} samples" if steps.num_pads else ""
    yield "steps", "steps", f"{steps.num_steps:,} an epoch{last}"
    yield "order", "order", f"L = {order.num_lanes} lanes, q = {order.block_size}, w = {order.window} (docs/order.md)"
    if mixing := estimate.mixing:
        text = (
            f"{mixing.worst:.0f} of {mixing.num_classes:,} classes in a batch if they were stored class by class; "
            f"{mixing.uniform:.0f} from a uniform shuffle, which the order of a build comes near"
        )
        yield "mixing", "shuffle", text


def _cost_rows(estimate: Estimate, about: str) -> Iterator[tuple[str, str, str]]:
    stored, prices = estimate.stored, estimate.prices
    price = _dollars(prices.month(stored.num_bytes))
    mean = f"{about}{stored.splits[estimate.split].mean_bytes:,.0f} bytes a sample in its tar"
    yield "stored_bytes", "storage", f"{about}{_size(stored.num_bytes)} in all splits, {price} a month; {mean}"
    if build := estimate.build:
        price = _dollars(prices.requests(**asdict(build)))
        text = f"about {build.class_b:,} reads and {build.class_a:,} writes and lists, {price}"
        yield "build", "build", f"{text}, if the raw files are in a bucket{_ramp(ramp.build_s(**asdict(build)))}"


def _ramp(seconds: float) -> str:
    """What a build waits for the bucket; nothing below an hour, which only very many workers would notice."""
    return f"; at least {seconds / 3600:.1f} hours while the bucket scales up" if seconds >= 3600 else ""


def _requests(reads: ReadEstimate, prices: Prices) -> str:
    first, later = (_dollars(prices.requests(class_b=number)) for number in (reads.first_gets, reads.later_gets))
    return (
        f"{reads.first_gets:,} in the first epoch, {first}: {reads.block_gets:,} reads of blocks, "
        f"{reads.first_batch_gets + reads.pad_gets:,} of single samples, {reads.index_gets:,} of indexes; "
        f"hedging adds 3 % at most. Each epoch after it {reads.later_gets:,}, {later}"
    )


def _memory(memory: Memory, num_readers: int) -> str:
    sizes = {name: getattr(memory, name) for name in ("raw", "decoded", "indexes", "cache")}
    listed = ", ".join(f"{_size(num_bytes)} {name}" for name, num_bytes in sizes.items() if num_bytes)
    total = _size(memory.total * num_readers)
    readers, each = (f" ({num_readers:,} readers)", " each") if num_readers > 1 else ("", "")
    return f"at most {total} a host{readers}: {listed}{each}"


def to_json(estimate: Estimate) -> dict[str, Any]:
    """The same numbers as JSON: bytes, counts and US dollars."""
    stored, reads, memory, cold = estimate.stored, estimate.reads, estimate.memory, estimate.cold
    host = {"readers_per_host": estimate.reading.readers_per_host}
    return {
        "exact": not stored.assumption,
        "assumptions": [{"about": "bytes", "text": stored.assumption}] if stored.assumption else [],
        "assumed": sorted(_ON_SIZES) if stored.assumption else [],
        "splits": {name: _split_json(split) for name, split in stored.splits.items()},
        "num_classes": stored.num_classes,
        "manifest_bytes": stored.manifest_bytes,
        "stored_bytes": stored.num_bytes,
        "split": estimate.split,
        "reading": asdict(estimate.reading) | {"num_readers": estimate.reading.num_readers},
        "order": {"L": estimate.order.num_lanes, "q": estimate.order.block_size, "w": estimate.order.window},
        "steps": asdict(estimate.steps),
        "mixing": asdict(estimate.mixing) if estimate.mixing else None,
        "reads": asdict(reads) | {"first_gets": reads.first_gets, "later_gets": reads.later_gets} if reads else None,
        "cold_start": asdict(cold) | {"num_bytes": cold.num_bytes} if cold else None,
        "memory": asdict(memory) | {"total": memory.total} | host if memory else None,
        "build": asdict(estimate.build) if estimate.build else None,
        "dollars": _dollars_json(estimate),
        "advice": estimate.advice,
        "refusals": estimate.refusals,
    }


def _split_json(split: StoredSplit) -> dict[str, int | float]:
    plan = split.plan
    return {
        "num_source_samples": plan.num_source,
        "num_samples": plan.num_stored,
        "num_dropped": plan.num_dropped,
        "num_repeats": plan.num_repeats,
        "num_shards": plan.num_shards,
        "smallest_shard": min(split.shard_sizes),
        "largest_shard": max(split.shard_sizes),
        "tar_bytes": split.num_bytes,
        "index_bytes": sum(split.index_bytes),
        "mean_bytes": split.mean_bytes,
    }


def _dollars_json(estimate: Estimate) -> dict[str, float | None]:
    prices, reads, build = estimate.prices, estimate.reads, estimate.build
    return {
        "storage_month": prices.month(estimate.stored.num_bytes),
        "build": prices.requests(**asdict(build)) if build else None,
        "first_epoch": prices.requests(class_b=reads.first_gets) if reads else None,
        "later_epoch": prices.requests(class_b=reads.later_gets) if reads else None,
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} PB"


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.01 or amount == 0 else "under $0.01"
