"""All numbers that `estimate` shows about one split, as a table of 80 columns or as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from pipelines import summary
from pipelines.estimate.advice import advice_on
from pipelines.estimate.reading import (
    Mixing,
    Reading,
    Steps,
    gap_factor,
    memory_of,
    mixing_of,
    steps_of,
)
from pipelines.estimate.stored import StoredSet
from shardset.errors import ConfigError
from shardset.order.budget import Memory, fit_order
from shardset.order.epoch import Order
from shardset.order.lanes import read_factor
from shardset.program import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What `estimate` shows.

    `refusal` says why a run would be refused, else "": then `memory` is None.

    `read_bytes` are those of an epoch by all readers, which is `amplification` times the bytes of
    its samples.
    """

    stored: StoredSet
    split: str
    reading: Reading
    order: Order = field(repr=False)
    steps: Steps
    mixing: Mixing | None
    amplification: float
    read_bytes: int
    memory: Memory | None
    advice: list[str]
    refusal: str


def estimate(stored: StoredSet, split: str, reading: Reading) -> Estimate:
    """All numbers of one split; raises ConfigError if they make no order."""
    stored_split = stored.splits[split]
    order = fit_order(
        stored_split.shard_sizes,
        reading.order_options,
        stored_bytes=stored_split.num_bytes,
        view=stored_split.view,
    )
    memory, steps, refusal = None, steps_of(order), ""
    amplification = read_factor(
        order.num_lanes, order.global_batch_size, reading.num_readers
    ) * gap_factor(order)
    try:
        memory = memory_of(stored_split, order, reading)
    except ConfigError as error:
        refusal = str(error)
    return Estimate(
        stored=stored,
        split=split,
        reading=reading,
        order=order,
        steps=steps,
        mixing=mixing_of(order, stored.num_classes) if stored.num_classes > 1 else None,
        amplification=amplification,
        read_bytes=round(amplification * stored_split.mean_bytes * order.num_samples),
        memory=memory,
        advice=[*advice_on(stored_split, order, reading, steps)],
        refusal=refusal,
    )


def show(found: Estimate, console: Console) -> None:
    """Prints the splits, what reading one of them takes, advice, and what was assumed."""
    console.print(
        summary.split_table(
            found.stored.title, [split.plan for split in found.stored.splits.values()]
        )
    )
    reading = found.reading
    replicas, hosts = count(reading.num_replicas, "replica"), count(reading.num_hosts, "host")
    readers = f"{reading.strategy}: {count(reading.num_readers, 'reader')}"
    heading = (
        f"{found.split}, read in batches of {reading.global_batch_size:,} by {replicas} on {hosts}"
        f" ({readers})"
    )
    console.print(f"\n{heading}", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in _rows(found):
        table.add_row(name, Text(text))
    console.print(table)
    for sentence in found.advice:
        console.print(Text(f"\n- {sentence}"))
    if found.refusal:
        console.print(Text(f"\nrefused: {found.refusal}", style="bold red"))
    if assumed := found.stored.assumption:
        console.print(
            Text(f"\nassumed: {assumed}; so bytes, memory, order and shuffle are about right.")
        )


def _rows(found: Estimate) -> Iterator[tuple[str, str]]:
    order, steps, stored = found.order, found.steps, found.stored
    last = f", the last with {steps.num_last:,} samples" if steps.num_pads else ""
    if (view := stored.splits[found.split].view) and view.digest:
        yield "view", f"{view.num_kept:,} of {view.num_ids:,} samples"
    yield "steps", f"{steps.num_steps:,} an epoch{last}"
    yield (
        "order",
        f"L = {order.num_lanes} lanes, q = {order.block_size}, w = {order.window} (docs/order.md)",
    )
    if mixing := found.mixing:
        yield (
            "shuffle",
            (
                f"{mixing.worst:.0f} of {stored.num_classes:,} classes in a batch if they were"
                f" stored class by class; {mixing.uniform:.0f} from a uniform shuffle, which the"
                " order of a build comes near"
            ),
        )
    mean = stored.splits[found.split].mean_bytes
    yield (
        "stored",
        f"{decimal(stored.num_bytes)} in all splits; {mean:,.0f} bytes a sample in its tar",
    )
    yield (
        "read",
        f"{decimal(found.read_bytes)} an epoch, {found.amplification:.3f} times what is stored",
    )
    if found.memory:
        yield (
            "memory",
            _memory(found.memory, max(1, found.reading.num_readers // found.reading.num_hosts)),
        )


def _memory(memory: Memory, num_readers: int) -> str:
    sizes = {name: getattr(memory, name) for name in ("raw", "decoded", "indexes", "cache")}
    listed = ", ".join(
        f"{decimal(num_bytes)} {name}" for name, num_bytes in sizes.items() if num_bytes
    )
    readers, each = (f" ({num_readers:,} readers)", " each") if num_readers > 1 else ("", "")
    return f"at most {decimal(memory.total * num_readers)} a host{readers}: {listed}{each}"


def to_json(found: Estimate) -> dict[str, Any]:
    """The same numbers as JSON: bytes and counts."""
    stored, memory, order, reading = found.stored, found.memory, found.order, found.reading
    splits = {
        name: (
            {
                f"num_{part}": getattr(split.plan, f"num_{part}")
                for part in ("dropped", "repeats", "shards")
            }
            | {"num_source_samples": split.plan.num_source, "num_samples": split.plan.num_stored}
            | {"smallest_shard": min(split.shard_sizes), "largest_shard": max(split.shard_sizes)}
            | {"tar_bytes": split.num_bytes, "mean_bytes": split.mean_bytes}
        )
        for name, split in stored.splits.items()
    }
    return {
        "assumption": stored.assumption or None,
        "splits": splits,
        "num_classes": stored.num_classes,
        "split": found.split,
        "reading": asdict(reading) | {"num_readers": reading.num_readers},
        "order": {"L": order.num_lanes, "q": order.block_size, "w": order.window},
        "steps": asdict(found.steps),
        "mixing": asdict(found.mixing) if found.mixing else None,
        "read_bytes": found.read_bytes,
        "amplification": found.amplification,
        "memory": asdict(memory) | {"total": memory.total} if memory else None,
        "advice": found.advice,
        "refusal": found.refusal or None,
    }
