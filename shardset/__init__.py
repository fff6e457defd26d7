"""A shard set: its format, its order, its storage, and the reader that any loop can import.

    stream = shardset.Stream("gs://bucket/photos", "train", batch_size=256, image_size=224)
    sample = shardset.open("gs://bucket/photos", "train")[17]

The reader's names (`Stream` and what it takes) are imported on first use, because they need the decoders of
`pip install 'shardset[read]'`. Nothing here imports Beam or torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardset.errors import ShardsetError, brought_by
from shardset.format.manifest import Manifest, Shard, Split, load
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from shardset.version import __version__

if TYPE_CHECKING:
    from shardset.decode.augment import Chain, RandAugment, RandomErasing, TrivialAugment
    from shardset.decode.crops import CenterCrop, PadCrop, RandomResizedCrop
    from shardset.decode.image import ImageSpec
    from shardset.order.state import OrderState, state_from_json
    from shardset.read.disk_cache import DiskCache
    from shardset.stream.mixture import MixedStream, Share
    from shardset.stream.samples import Sample, SampleSet, open
    from shardset.stream.spec import Batch
    from shardset.stream.stream import Stream, order_options
    from shardset.stream.timetable import Timetable
    from shardset.writer import Writer

__all__ = [
    "Batch",
    "CenterCrop",
    "Chain",
    "DiskCache",
    "ImageSpec",
    "Manifest",
    "MixedStream",
    "OrderState",
    "PadCrop",
    "RandAugment",
    "RandomErasing",
    "RandomResizedCrop",
    "Sample",
    "SampleSet",
    "Shard",
    "ShardsetError",
    "Share",
    "Split",
    "Storage",
    "Stream",
    "Timetable",
    "TrivialAugment",
    "Writer",
    "__version__",
    "load",
    "open",
    "open_storage",
    "order_options",
    "state_from_json",
]

_READER = {
    "Batch": "shardset.stream.spec",
    "CenterCrop": "shardset.decode.crops",
    "Chain": "shardset.decode.augment",
    "DiskCache": "shardset.read.disk_cache",
    "ImageSpec": "shardset.decode.image",
    "MixedStream": "shardset.stream.mixture",
    "OrderState": "shardset.order.state",
    "PadCrop": "shardset.decode.crops",
    "RandAugment": "shardset.decode.augment",
    "RandomErasing": "shardset.decode.augment",
    "RandomResizedCrop": "shardset.decode.crops",
    "Sample": "shardset.stream.samples",
    "SampleSet": "shardset.stream.samples",
    "Share": "shardset.stream.mixture",
    "Stream": "shardset.stream.stream",
    "Timetable": "shardset.stream.timetable",
    "TrivialAugment": "shardset.decode.augment",
    "Writer": "shardset.writer",
    "open": "shardset.stream.samples",
    "order_options": "shardset.stream.stream",
    "state_from_json": "shardset.order.state",
}
"""Modules of the names that need more than the base requirements."""


def __getattr__(name: str) -> Any:
    if name not in _READER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with brought_by("read"):
        value = getattr(importlib.import_module(_READER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
