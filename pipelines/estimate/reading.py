"""How a split is read: the order, steps, mixing and memory that the trainer would choose.

`shardset.order` does the arithmetic here and in a run, so these numbers are exact.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardset.order.budget import BUDGET_BYTES, OrderOptions
from shardset.order.epoch import LastBatch, Order
from shardset.settings import Count, Size, check, setting

NUM_MEASURED, MEASURED_EVERY = 11, 100
MEASURED_READS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Who reads a split, and how. Where L, q or w is None, the trainer's default applies."""

    global_batch_size: Count = setting(256, "samples of a step over all replicas")
    num_replicas: Count = setting(1, "number of replicas")
    num_hosts: Count = setting(1, "number of hosts that they run on")
    strategy: Literal["spmd", "replica", "ddp", "single"] = setting(
        "spmd", "who reads: hosts (spmd), replicas (replica, ddp), one (single)"
    )
    num_lanes: Count | None = setting(None, "L; default: as the trainer chooses")
    block_size: Count | None = setting(None, "q; default: as the trainer chooses")
    window: Size | None = setting(None, "w; default: as the trainer chooses")
    last_batch: LastBatch = setting("pad", "pad a batch that is not full, or drop it")
    image_size: Size = setting(224, "decoded images are N x N; 0 decodes nothing", metavar="N")
    crop_padding: Size | None = setting(
        None,
        "train_crop=pad with N pixels: small images stay decoded where they fit",
        metavar="N",
    )
    budget_bytes: Count = setting(BUDGET_BYTES, "bytes of memory of one reader")

    def __post_init__(self) -> None:
        check(self)

    @property
    def num_readers(self) -> int:
        """Number of streams that share the reading: hosts with spmd,
        replicas with replica and ddp.
        """
        return {"spmd": self.num_hosts, "single": 1}.get(self.strategy, self.num_replicas)

    @property
    def order_options(self) -> OrderOptions:
        """The options of the order of a run that reads so."""
        return OrderOptions(
            # as in docs/explanation/order.md: how well an order mixes hardly depends on it
            seed=1,
            global_batch_size=self.global_batch_size,
            world_size=self.num_readers,
            num_lanes=self.num_lanes,
            block_size=self.block_size,
            window=self.window,
            last_batch=self.last_batch,
            budget_bytes=self.budget_bytes,
        )


def steps_of(order: Order) -> dict[str, int]:
    """The steps of an epoch.

    The last one has `num_last` samples and `num_pads` repeats of weight 0; `drop` leaves out
    `num_left_out` samples.
    """
    room = order.num_batches * order.global_batch_size
    pads = max(0, room - order.num_samples)
    return {
        "num_steps": order.num_batches,
        "num_last": order.global_batch_size - pads if order.num_batches else 0,
        "num_pads": pads,
        "num_left_out": max(0, order.num_samples - room),
    }


def gap_factor(order: Order) -> float:
    """The bytes that the reads of a view bring for each byte of its samples, at the beginning of an
    epoch.
    """
    if not order.selection.digest:
        return 1.0
    positions = np.arange(min(order.num_samples, MEASURED_READS))
    lanes = ((positions + 1) * order.num_lanes - 1) // order.num_samples
    reads = order.reads_of(0, lanes, positions)
    once = np.unique(reads.first, return_index=True)[1]
    return float((reads.stop - reads.start)[once].sum() / reads.num_samples[once].sum())


def mixing_of(order: Order, num_classes: int) -> dict[str, float]:
    """The mean number of classes in eleven batches; 100 steps apart if the epoch has at least 1,200
    steps.

    `worst` is for samples stored class by class, measured as in docs/explanation/order.md.
    `uniform` is for batches drawn from the whole split; real batches come close to it, because a
    build permutes the samples.
    """
    every = max(1, min(MEASURED_EVERY, order.num_batches // (NUM_MEASURED + 1)))
    stop = min(order.num_batches, (NUM_MEASURED + 1) * every)
    batches = (order.batch(0, step) for step in range(every, stop, every) or [0])
    ids = (slots.ids[slots.weights > 0] for slots in batches)
    size = min(order.global_batch_size, order.num_samples)
    return {
        "worst": classes_in(ids, int(order.first_ids[-1]), num_classes),
        "uniform": classes_expected(order.num_samples, size, num_classes),
    }


def classes_in(batches: Iterable[np.ndarray], num_samples: int, num_classes: int) -> float:
    """Mean number of classes in batches of ids, if samples were stored class by class and all
    classes were equal.
    """
    return float(np.mean([len(np.unique(ids * num_classes // num_samples)) for ids in batches]))


def classes_expected(num_samples: int, batch_size: int, num_classes: int) -> float:
    """Mean number of classes in a batch drawn from all samples without replacement, if all classes
    are equal.
    """
    left = num_samples - np.arange(batch_size)
    missed = np.prod(np.maximum(0, 1 - num_samples / num_classes / left))
    return float(num_classes * (1 - missed))
