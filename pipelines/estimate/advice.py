"""Advice on numbers that do not divide, with the nearest that do, and on the cost of the memory budget."""

from pipelines.estimate.divisors import nearest_divisors, nearest_multiples, or_list
from pipelines.estimate.reading import Reading, Steps
from pipelines.estimate.requests import ReadEstimate
from pipelines.estimate.stored import StoredSplit
from shardset.order.budget import DEFAULT_WINDOW, INDEX_BUDGET_BYTES, INDEX_BYTES, held_bytes
from shardset.order.epoch import Order
from shardset.order.lanes import default_lanes, lanes_of_reader


def advice_on(
    stored: StoredSplit, order: Order, reading: Reading, steps: Steps, reads: ReadEstimate | None
) -> list[str]:
    """A sentence or two for each number worth changing."""
    return [
        *_on_shard_sizes(stored),
        *_on_batches(order, steps),
        *_on_shares(order, reading),
        *_on_lanes(order, reads),
        *_on_plain_readers(stored, reading),
        *_on_window(stored, order, reading),
        *_on_indexes(order, reads),
    ]


def _on_shard_sizes(stored: StoredSplit) -> list[str]:
    total, count = stored.plan.num_stored, stored.plan.num_shards
    small, left = divmod(total, count)
    if not left:
        return []
    divisors = nearest_divisors(total, count)
    why = f"{total:,} is prime" if set(divisors) <= {1, total} else f"{or_list(divisors)} shards divide it"
    return [
        f"{total:,} samples over {count:,} shards: {left:,} of {small + 1:,} and {count - left:,} of {small:,} "
        f"({why}). This trainer does not mind. For equal shards --remainder drop leaves out {left:,} "
        f"({total - left:,} = {count:,} x {small:,}), --remainder pad repeats {count - left:,} "
        f"({total + count - left:,} = {count:,} x {small + 1:,})."
    ]


def _on_batches(order: Order, steps: Steps) -> list[str]:
    size = order.global_batch_size
    if steps.num_left_out:
        return [
            f"Each epoch leaves out {steps.num_left_out:,} samples, others each time, because {order.num_samples:,} "
            f"is not a multiple of {size:,} (--last-batch drop)."
        ]
    if not steps.num_pads:
        return []
    fits = [n for n in nearest_divisors(order.num_samples, size) if size / 2 <= n <= 2 * size]
    also = f" Batches of {or_list(fits)} would divide." if fits else ""
    return [
        f"{order.num_samples:,} samples over batches of {size:,}: the last batch has {steps.num_last:,}, and "
        f"{steps.num_pads:,} repeats of weight 0, which count nowhere.{also}"
    ]


def _on_shares(order: Order, reading: Reading) -> list[str]:
    size, replicas = order.global_batch_size, reading.num_replicas
    most = -(-size // replicas)
    if not size % replicas or size < replicas:
        return []
    return [
        f"Batches of {size:,} over {replicas:,} replicas: {most * replicas - size:,} of them have {most - 1:,} samples "
        f"and a repeat of weight 0, the others {most:,}. Batches of {or_list(nearest_multiples(replicas, size))} would "
        "divide."
    ]


def _on_lanes(order: Order, reads: ReadEstimate | None) -> list[str]:
    if reads is None or reads.amplification <= 1:
        return []
    fits = nearest_divisors(order.num_lanes, reads.num_readers)
    most = max(order.num_lanes, reads.num_readers)
    better = [n for n in range(reads.num_readers, most + 1, reads.num_readers) if order.global_batch_size % n == 0]
    also = f", or --num-lanes {better[-1]}" if better else ""
    return [
        f"{order.num_lanes} lanes over {reads.num_readers} readers: several readers read the same lanes, "
        f"{reads.amplification:.2f} times the stored bytes. {or_list(fits)} readers share none{also}."
    ]


def _on_plain_readers(stored: StoredSplit, reading: Reading) -> list[str]:
    if reading.num_workers is None:
        return []
    shards, readers = len(stored.shard_sizes), reading.num_replicas * reading.num_workers
    who = f"{reading.num_replicas} replicas x {reading.num_workers} workers"
    if shards % readers == 0:
        return [f"{shards:,} shards over {who}: {shards // readers} for each plain tar reader."]
    each = f"{shards // readers} or {shards // readers + 1}" if shards > readers else "0 or 1"
    per_replica, left = divmod(shards, reading.num_replicas)
    workers = [] if left else nearest_divisors(per_replica, reading.num_workers)
    also = f", or {or_list(workers)} workers" if workers else ""
    return [
        f"{shards:,} shards over {who} = {readers:,} plain tar readers (webdataset, one shard at a time): {each} "
        f"each, so their epochs differ in length. {or_list(nearest_multiples(readers, shards))} shards{also} would "
        "divide. This trainer's stream cuts by sample, so it is not affected."
    ]


def _on_window(stored: StoredSplit, order: Order, reading: Reading) -> list[str]:
    if reading.window is not None or reading.num_lanes is not None or order.window >= DEFAULT_WINDOW:
        return []
    wanted = default_lanes(order.global_batch_size, reading.num_readers)
    needed = 2 * held_bytes(
        stored.mean_bytes,
        num_lanes=lanes_of_reader(wanted, reading.num_readers),
        block_size=order.block_size,
        window=DEFAULT_WINDOW + 1,
    )
    lanes = f" and L from {wanted} to {order.num_lanes}" if order.num_lanes < wanted else ""
    return [
        f"The budget of {reading.budget_bytes / 2**30:.3g} GiB a reader lowers w from {DEFAULT_WINDOW} to "
        f"{order.window}{lanes}: neighbours in a shard stay together. {needed / 2**30:.1f} GiB are enough for the "
        f"default (--budget-bytes {needed}; in a run --set budget_bytes={needed}), or store smaller images."
    ]


def _on_indexes(order: Order, reads: ReadEstimate | None) -> list[str]:
    if reads is None or reads.indexes_fit:
        return []
    return [
        f"The indexes of {order.num_samples:,} samples take about {INDEX_BYTES * order.num_samples / 2**30:.1f} GiB in "
        f"memory, and a reader keeps {INDEX_BUDGET_BYTES >> 20} MiB of them: the readers read indexes again and again, "
        f"about {reads.index_gets:,} times in an epoch, {reads.index_bytes / 1e12:,.2f} TB."
    ]
