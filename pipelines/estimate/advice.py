"""Advice on numbers that do not divide, with the nearest that do, and on the cost of the memory
budget.
"""

import math
from collections.abc import Iterator, Sequence

from pipelines.estimate.reading import Reading, Steps
from pipelines.estimate.stored import StoredSplit
from shardset.order.budget import DEFAULT_WINDOW, held_bytes
from shardset.order.epoch import Order
from shardset.order.lanes import default_lanes, lanes_of_reader, read_factor


def nearest_divisors(number: int, wish: int) -> list[int]:
    """The largest divisor of `number` up to `wish` and the smallest above it, where they exist."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    return [*[n for n in divisors if n <= wish][-1:], *[n for n in divisors if n > wish][:1]]


def nearest_multiples(number: int, wish: int) -> list[int]:
    """The largest multiple of `number` up to `wish`, if it is not 0, and the smallest above it."""
    below = wish // number * number
    return [n for n in (below, below + number) if n]


def advice_on(stored: StoredSplit, order: Order, reading: Reading, steps: Steps) -> Iterator[str]:
    """A sentence or two for each number worth changing."""
    yield from _on_mixing(stored, order)
    yield from _on_shard_sizes(stored)
    yield from _on_batches(order, reading, steps)
    yield from _on_lanes(order, reading)
    yield from _on_memory(stored, order, reading)


def _on_mixing(stored: StoredSplit, order: Order) -> Iterator[str]:
    if not stored.is_mixed:
        yield (
            f"Nobody promises that these tars are mixed: a step draws from {order.num_lanes:,}"
            f" blocks of {order.block_size:,} neighbours; where these are alike, expect the first"
            " number of `shuffle`. Raise --num-lanes or --window, or mix once: `build --source"
            " webdataset`."
        )


def _on_shard_sizes(stored: StoredSplit) -> Iterator[str]:
    total, count = stored.plan.num_stored, stored.plan.num_shards
    small, left = divmod(total, count)
    if left and max(stored.shard_sizes) - min(stored.shard_sizes) <= 1:
        divisors = nearest_divisors(total, count)
        why = (
            f"{total:,} is prime"
            if set(divisors) <= {1, total}
            else f"{_or(divisors)} shards divide it"
        )
        yield (
            f"{total:,} samples over {count:,} shards: {left:,} of {small + 1:,} and"
            f" {count - left:,} of {small:,} ({why}). This trainer does not mind. For equal shards"
            f" --remainder drop leaves out {left:,} ({total - left:,} = {count:,} x {small:,}),"
            f" --remainder pad repeats {count - left:,} ({total + count - left:,} = {count:,} x"
            f" {small + 1:,})."
        )


def _on_batches(order: Order, reading: Reading, steps: Steps) -> Iterator[str]:
    size, replicas = order.global_batch_size, reading.num_replicas
    if steps.num_left_out:
        yield (
            f"Each epoch leaves out {steps.num_left_out:,} samples, others each time, because"
            f" {order.num_samples:,} is not a multiple of {size:,} (--last-batch drop)."
        )
    if steps.num_pads:
        fits = [n for n in nearest_divisors(order.num_samples, size) if size / 2 <= n <= 2 * size]
        also = f" Batches of {_or(fits)} would divide." if fits else ""
        yield (
            f"{order.num_samples:,} samples over batches of {size:,}: the last batch has"
            f" {steps.num_last:,}, and {steps.num_pads:,} repeats of weight 0, which count"
            f" nowhere.{also}"
        )
    most = -(-size // replicas)
    if size % replicas and size > replicas:
        yield (
            f"Batches of {size:,} over {replicas:,} replicas: {most * replicas - size:,} of them"
            f" have {most - 1:,} samples and a repeat of weight 0, the others {most:,}. Batches of"
            f" {_or(nearest_multiples(replicas, size))} would divide."
        )


def _on_lanes(order: Order, reading: Reading) -> Iterator[str]:
    lanes, readers = order.num_lanes, reading.num_readers
    factor = read_factor(lanes, order.global_batch_size, readers)
    if factor > 1:
        better = [
            n
            for n in range(readers, max(lanes, readers) + 1, readers)
            if order.global_batch_size % n == 0
        ]
        also = f", or --num-lanes {better[-1]}" if better else ""
        yield (
            f"{lanes} lanes over {readers} readers: several readers read the same lanes,"
            f" {factor:.2f} times the stored bytes. {_or(nearest_divisors(lanes, readers))} readers"
            f" share none{also}."
        )


def _on_memory(stored: StoredSplit, order: Order, reading: Reading) -> Iterator[str]:
    if reading.window is None and reading.num_lanes is None and order.window < DEFAULT_WINDOW:
        wanted = default_lanes(order.global_batch_size, reading.num_readers)
        needed = 2 * held_bytes(
            stored.mean_bytes,
            num_lanes=lanes_of_reader(wanted, reading.num_readers),
            block_size=order.block_size,
            window=DEFAULT_WINDOW + 1,
        )
        lanes = f" and L from {wanted} to {order.num_lanes}" if order.num_lanes < wanted else ""
        yield (
            f"The budget of {reading.budget_bytes / 2**30:.3g} GiB a reader lowers w from"
            f" {DEFAULT_WINDOW} to {order.window}{lanes}: neighbours in a shard stay together."
            f" {needed / 2**30:.1f} GiB are enough for the default (--budget-bytes {needed}; in a"
            f" run --set budget_bytes={needed}), or store smaller images."
        )


def _or(numbers: Sequence[int]) -> str:
    """`512 or 768`."""
    return " or ".join(f"{number:,}" for number in numbers)
