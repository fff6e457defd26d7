"""All numbers that `estimate` shows about one split, as JSON and as a table of 80 columns."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from pipelines.estimate.reading import Reading, gap_factor, mixing_of, steps_of
from pipelines.estimate.stored import StoredSet, StoredSplit
from pipelines.split_table import split_table
from shardset.errors import DOCS, ConfigError
from shardset.order.budget import DEFAULT_WINDOW, Memory, fit_memory, fit_order
from shardset.order.epoch import Order
from shardset.order.lanes import check_world, rank_part, read_factor
from shardset.program import count
from shardset.terminal import table

Estimate = dict[str, Any]
"""What `estimate` shows, as JSON: bytes and counts.

`refusal` says why a run would be refused, else it is None: then `memory` is None. `read_bytes`
counts an epoch by all readers, which is `amplification` times the bytes of its samples.
"""


def estimate(stored: StoredSet, split: str, reading: Reading) -> Estimate:
    """All numbers of one split; raises ConfigError if they make no order."""
    stored_split = stored.splits[split]
    numbers = stored_split.numbers
    order = fit_order(
        stored_split.shard_sizes,
        reading.order_options,
        stored_bytes=numbers.num_bytes,
        view=stored_split.view,
    )
    memory, refusal, steps = None, None, steps_of(order)
    amplification = read_factor(
        order.num_lanes, order.global_batch_size, reading.num_readers
    ) * gap_factor(order)
    try:
        memory = _memory_of(stored_split, order, reading)
    except ConfigError as error:
        refusal = str(error)
    return {
        "assumption": stored.assumption or None,
        "splits": {name: msgspec.to_builtins(each.numbers) for name, each in stored.splits.items()},
        "num_classes": stored.num_classes,
        "split": split,
        "reading": asdict(reading) | {"num_readers": reading.num_readers},
        "order": {"L": order.num_lanes, "q": order.block_size, "w": order.window},
        "steps": steps,
        "mixing": mixing_of(order, stored.num_classes) if stored.num_classes > 1 else None,
        "read_bytes": round(amplification * numbers.mean_bytes * order.num_samples),
        "amplification": amplification,
        "memory": asdict(memory) | {"total": memory.total} if memory else None,
        "advice": [*_advice(stored_split, order, reading, steps)],
        "refusal": refusal,
    }


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


def show(stored: StoredSet, figures: Estimate, console: Console) -> None:
    """Prints the splits, what reading one of them takes, advice, and what was assumed."""
    console.print(split_table(stored.title, [split.numbers for split in stored.splits.values()]))
    reading = figures["reading"]
    console.print(
        f"\n{figures['split']}, read in batches of {reading['global_batch_size']:,} by"
        f" {count(reading['num_replicas'], 'replica')} on {count(reading['num_hosts'], 'host')}"
        f" ({reading['strategy']}: {count(reading['num_readers'], 'reader')})"
        f"\n({DOCS}/how-to/check.md#estimate)",
        highlight=False,
    )
    console.print(table("", ["", ""], [*_rows(stored, figures)]))
    for sentence in figures["advice"]:
        console.print(Text(f"\n- {sentence}"))
    if figures["refusal"]:
        console.print(Text(f"\nrefused: {figures['refusal']}", style="bold red"))
    if stored.assumption:
        what = "so bytes, memory, order and shuffle are about right"
        console.print(Text(f"\nassumed: {stored.assumption}; {what}."))


def _rows(stored: StoredSet, figures: Estimate) -> Iterator[tuple[str, str]]:
    split, steps, order = stored.splits[figures["split"]], figures["steps"], figures["order"]
    last = f", the last with {steps['num_last']:,} samples" if steps["num_pads"] else ""
    if split.view and split.view.digest:
        yield "view", f"{split.view.num_kept:,} of {split.view.num_ids:,} samples"
    yield "steps", f"{steps['num_steps']:,} an epoch{last}"
    yield "order", f"L = {order['L']} lanes, q = {order['q']}, w = {order['w']}"
    if mixing := figures["mixing"]:
        shuffle = (
            f"{mixing['worst']:.0f} of {stored.num_classes:,} classes in a batch if stored class"
            f" by class, {mixing['uniform']:.0f} if fully shuffled; a build comes near that"
        )
        yield "shuffle", shuffle
    size, mean = decimal(stored.num_bytes), split.numbers.mean_bytes
    yield "stored", f"{size} in all splits; {mean:,.0f} bytes a sample in its tar"
    size, amplification = decimal(figures["read_bytes"]), figures["amplification"]
    yield "read", f"{size} an epoch, {amplification:.3f} times what is stored"
    if figures["memory"]:
        yield "memory", _memory(figures["memory"], figures["reading"])


def _memory(memory: Mapping[str, int], reading: Mapping[str, int]) -> str:
    listed = ", ".join(
        f"{decimal(memory[name])} {name}"
        for name in ("raw", "decoded", "indexes", "cache")
        if memory[name]
    )
    num_readers = max(1, reading["num_readers"] // reading["num_hosts"])
    readers, each = (f" ({num_readers:,} readers)", " each") if num_readers > 1 else ("", "")
    return f"at most {decimal(memory['total'] * num_readers)} a host{readers}: {listed}{each}"


def _advice(
    stored: StoredSplit, order: Order, reading: Reading, steps: Mapping[str, int]
) -> Iterator[str]:
    """A sentence or two for each number worth changing."""
    if not stored.is_mixed:
        yield (
            f"Nobody promises that these tars are mixed: a step draws from {order.num_lanes:,}"
            f" blocks of {order.block_size:,} neighbours; where these are alike, expect the first"
            " number of `shuffle`. Raise --num-lanes or --window, or mix once: `build --source"
            " webdataset`."
        )
    total, num_shards = stored.numbers.num_samples, stored.numbers.num_shards
    small, left = divmod(total, num_shards)
    if left and max(stored.shard_sizes) - min(stored.shard_sizes) <= 1:
        others = num_shards - left
        yield (
            f"{total:,} samples over {num_shards:,} shards: {left:,} of {small + 1:,} and"
            f" {others:,} of {small:,}. This trainer does not mind. For equal shards"
            f" --remainder drop leaves out {left:,} ({total - left:,} = {num_shards:,} x"
            f" {small:,}), --remainder pad repeats {others:,} ({total + others:,} ="
            f" {num_shards:,} x {small + 1:,})."
        )
    size, replicas = order.global_batch_size, reading.num_replicas
    if steps["num_left_out"]:
        yield (
            f"Each epoch leaves out {steps['num_left_out']:,} samples, others each time, because"
            f" {order.num_samples:,} is not a multiple of {size:,} (--last-batch drop)."
        )
    if steps["num_pads"]:
        yield (
            f"{order.num_samples:,} samples over batches of {size:,}: the last batch has"
            f" {steps['num_last']:,}, and {steps['num_pads']:,} repeats of weight 0, which count"
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
