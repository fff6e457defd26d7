"""The number of classes in a batch, measured on the order itself."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardset.order.epoch import Order

NUM_MEASURED, MEASURED_EVERY = 11, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Mean number of classes in a batch.

    `worst` is for samples stored class by class, measured on the order as in docs/order.md. `uniform` is for batches
    drawn from the whole split; real batches come close to it, because a build permutes the samples.
    """

    num_classes: int
    worst: float
    uniform: float


def mixing_of(order: Order, num_classes: int) -> Mixing:
    """The mean of eleven batches; 100 steps apart if the epoch has at least 1,200 steps."""
    every = max(1, min(MEASURED_EVERY, order.num_batches // (NUM_MEASURED + 1)))
    steps = [step for step in range(every, (NUM_MEASURED + 1) * every, every) if step < order.num_batches] or [0]
    batches = (order.batch(0, step) for step in steps)
    return Mixing(
        num_classes=num_classes,
        worst=classes_in((slots.ids[slots.weights > 0] for slots in batches), order.num_samples, num_classes),
        uniform=classes_expected(order.num_samples, min(order.global_batch_size, order.num_samples), num_classes),
    )


def classes_in(batches: Iterable[np.ndarray], num_samples: int, num_classes: int) -> float:
    """Mean number of classes in batches of ids, if samples were stored class by class and all classes were equal."""
    return float(np.mean([len(np.unique(ids * num_classes // num_samples)) for ids in batches]))


def classes_expected(num_samples: int, batch_size: int, num_classes: int) -> float:
    """Mean number of classes in a batch drawn from all samples without replacement, if all classes are equal."""
    others = num_samples - num_samples / num_classes
    if batch_size > others:
        return float(num_classes)
    log = math.lgamma  # binomial coefficients of millions exceed a float
    missed = log(others + 1) - log(others - batch_size + 1) - log(num_samples + 1) + log(num_samples - batch_size + 1)
    return num_classes * (1 - math.exp(missed))
