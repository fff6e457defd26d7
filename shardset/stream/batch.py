"""The batch that a stream yields, and how it is born."""

from typing import Required, TypedDict

import numpy as np

from shardset.read.addresses import SampleAddresses


class Batch(TypedDict, total=False):
    """One batch: arrays by name. Stored fields that were asked for stand beside these, as lists of bytes.

    Shapes and types are those of docs/stream.md; `source` is the number of the shard set in a mixture.
    """

    image: np.ndarray
    label: Required[np.ndarray]
    weight: Required[np.ndarray]
    id: Required[np.ndarray]
    flip: np.ndarray
    key: list[str]
    source: np.ndarray


BATCH_NAMES = frozenset(Batch.__annotations__)
"""Names that no stored field of a batch may have."""


def mask(batch: Batch, slot: int) -> None:
    """Makes a slot a black image of weight 0."""
    batch["weight"][slot] = 0
    if "image" in batch:
        batch["image"][slot] = 0


def set_sample(batch: Batch, slot: int, id_: int, addresses: SampleAddresses) -> None:
    """Gives a slot the id, label and key of the one sample of `addresses`."""
    batch["id"][slot], batch["label"][slot] = id_, addresses.labels.item(0)
    if addresses.keys is not None:
        batch["key"][slot] = addresses.keys[0]
