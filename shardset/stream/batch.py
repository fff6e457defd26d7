"""The batch that a stream yields, and how it is born."""

from typing import Any

from shardset.read.addresses import SampleAddresses

Batch = dict[str, Any]
"""One batch: arrays and lists by name, which the stream's options decide; docs/stream.md has their shapes and types."""

BATCH_NAMES = frozenset({"image", "label", "weight", "id", "flip", "key", "source"})
"""Names that no stored field of a batch may have; `source` is the number of the shard set in a mixture."""


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
