"""All numbers that `estimate` shows about one split, as a table of 80 columns or as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from pipelines.estimate.reading import (
    Mixing,
    Reading,
    Steps,
    gap_factor,
    mixing_of,
    steps_of,
)
from pipelines.estimate.stored import StoredSet, StoredSplit
from pipelines.split_table import split_table
from shardset.errors import DOCS, ConfigError
from shardset.order.budget import DEFAULT_WINDOW, Memory, fit_memory, fit_order
from shardset.order.epoch import Order
from shardset.order.lanes import check_world, rank_part, read_factor
from shardset.program import count
from shardset.terminal import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What `estimate` shows.

    `refusal` says why a run would be refused, else "": then `memory` is None.

    `read_bytes` counts an epoch by all readers, which is `amplification` times the bytes of
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
        stored_bytes=stored_split.numbers.num_bytes,
        view=stored_split.view,
    )
    memory, steps, refusal = None, steps_of(order), ""
    amplification = read_factor(
        order.num_lanes, order.global_batch_size, reading.num_readers
    ) * gap_factor(order)
    try:
        memory = _memory_of(stored_split, order, reading)
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
        read_bytes=round(amplification * stored_split.numbers.mean_bytes * order.num_samples),
        memory=memory,
        advice=[*_advice(stored_split, order, reading, steps)],
        refusal=refusal,
    )


def _memory_of(stored: StoredSplit, order: Order, reading: Reading) -> Memory:
    """The memory of one reader; raises the ConfigError with which a run of these numbers would
    stop.
    """
    if reading.num_replicas % reading.num_hosts:
        raise ConfigError(
            f"{reading.num_replicas} replicas do not divide over {reading.num_hosts} hosts; "
            f"use a number of hosts that divides {reading.num_replicas}"
        )
    check_world(reading.global_batch_size, 0, reading.num_replicas)
    image_bytes = 3 * reading.image_size**2
    # Images are kept as they are before PadCrop pads them.
    keeps_images = reading.crop_padding is not None and reading.image_size
    return fit_memory(
        order,
        reading.order_options,
        # the largest share
        rank_part(order.global_batch_size, reading.num_readers - 1, reading.num_readers),
        stored_bytes=stored.numbers.num_bytes,
        image_bytes=image_bytes,
        cache_bytes=stored.numbers.num_samples * image_bytes if keeps_images else None,
    )


def show(found: Estimate, console: Console) -> None:
    """Prints the splits, what reading one of them takes, advice, and what was assumed."""
    console.print(
        split_table(found.stored.title, [split.numbers for split in found.stored.splits.values()])
    )
    reading = found.reading
    console.print(
        f"\n{found.split}, read in batches of {reading.global_batch_size:,} by"
        f" {count(reading.num_replicas, 'replica')} on {count(reading.num_hosts, 'host')}"
        f" ({reading.strategy}: {count(reading.num_readers, 'reader')})",
        highlight=False,
    )
    console.print(f"({DOCS}/how-to/check.md#estimate)", highlight=False)
    console.print(table("", ["", ""], [*_rows(found)]))
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
    yield "order", f"L = {order.num_lanes} lanes, q = {order.block_size}, w = {order.window}"
    if mixing := found.mixing:
        yield (
            "shuffle",
            (
                f"{mixing.worst:.0f} of {stored.num_classes:,} classes in a batch if stored class"
                f" by class, {mixing.uniform:.0f} if fully shuffled; a build comes near that"
            ),
        )
    mean = stored.splits[found.split].numbers.mean_bytes
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
    return {
        "assumption": stored.assumption or None,
        "splits": {
            name: msgspec.to_builtins(split.numbers) for name, split in stored.splits.items()
        },
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


def _advice(stored: StoredSplit, order: Order, reading: Reading, steps: Steps) -> Iterator[str]:
    """A sentence or two for each number worth changing."""
    if not stored.is_mixed:
        yield (
            f"Nobody promises that these tars are mixed: a step draws from {order.num_lanes:,}"
            f" blocks of {order.block_size:,} neighbours; where these are alike, expect the first"
            " number of `shuffle`. Raise --num-lanes or --window, or mix once: `build --source"
            " webdataset`."
        )
    total, count = stored.numbers.num_samples, stored.numbers.num_shards
    small, left = divmod(total, count)
    if left and max(stored.shard_sizes) - min(stored.shard_sizes) <= 1:
        yield (
            f"{total:,} samples over {count:,} shards: {left:,} of {small + 1:,} and"
            f" {count - left:,} of {small:,}. This trainer does not mind. For equal shards"
            f" --remainder drop leaves out {left:,} ({total - left:,} = {count:,} x {small:,}),"
            f" --remainder pad repeats {count - left:,} ({total + count - left:,} = {count:,} x"
            f" {small + 1:,})."
        )
    size, replicas = order.global_batch_size, reading.num_replicas
    if steps.num_left_out:
        yield (
            f"Each epoch leaves out {steps.num_left_out:,} samples, others each time, because"
            f" {order.num_samples:,} is not a multiple of {size:,} (--last-batch drop)."
        )
    if steps.num_pads:
        yield (
            f"{order.num_samples:,} samples over batches of {size:,}: the last batch has"
            f" {steps.num_last:,}, and {steps.num_pads:,} repeats of weight 0, which count"
            " nowhere."
        )
    full = size % replicas
    if full and size > replicas:
        yield (
            f"Batches of {size:,} over {replicas:,} replicas: {full:,} of them have"
            f" {size // replicas + 1:,} samples, the others one less and a repeat of weight 0."
        )
    if reading.window is None and reading.num_lanes is None and order.window < DEFAULT_WINDOW:
        yield (
            f"The budget of {reading.budget_bytes / 2**30:.3g} GiB a reader lowers w from"
            f" {DEFAULT_WINDOW} to {order.window}: neighbours in a shard stay together. Raise"
            " --budget-bytes (in a run, --set budget_bytes), or store smaller images."
        )
