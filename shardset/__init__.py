"""A shard set: its format, its order, its storage, and the reader that any loop can import.

    stream = shardset.Stream("gs://bucket/photos", "train", batch_size=256, image_size=224)
    sample = shardset.open("gs://bucket/photos", "train")[17]

The reader's names (`Stream` and what it takes) are imported on first use, because they need the
decoders of `pip install 'shardset[read]'`. Nothing here imports Beam or torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardset.errors import ShardsetError, brought_by
from shardset.format.manifest import LoadedSet, Manifest, Shard, Split, load
from shardset.raw import Raw
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from shardset.version import __version__

if TYPE_CHECKING:
    from shardset.decode.augment import Chain, RandAugment, RandomErasing, TrivialAugment
    from shardset.decode.crops import CenterCrop, Letterbox, PadCrop, RandomResizedCrop, Resize
    from shardset.decode.image import ImageSpec
    from shardset.decode.targets import Boxes, Mask, Text
    from shardset.read.disk_cache import DiskCache
    from shardset.stream.mixed_stream import MixedStream, Share
    from shardset.stream.samples import Sample, SampleSet, open
    from shardset.stream.spec import Batch, StreamOptions
    from shardset.stream.stream import Stream
    from shardset.writer import Writer

__all__ = [
    "Batch",
    "Boxes",
    "CenterCrop",
    "Chain",
    "DiskCache",
    "ImageSpec",
    "Letterbox",
    "LoadedSet",
    "Manifest",
    "Mask",
    "MixedStream",
    "PadCrop",
    "RandAugment",
    "RandomErasing",
    "RandomResizedCrop",
    "Raw",
    "Resize",
    "Sample",
    "SampleSet",
    "Shard",
    "ShardsetError",
    "Share",
    "Split",
    "Storage",
    "Stream",
    "StreamOptions",
    "Text",
    "TrivialAugment",
    "Writer",
    "__version__",
    "load",
    "open",
    "open_storage",
]

_READER = {
    "decode.augment": "Chain RandAugment RandomErasing TrivialAugment",
    "decode.crops": "CenterCrop Letterbox PadCrop RandomResizedCrop Resize",
    "decode.image": "ImageSpec",
    "decode.targets": "Boxes Mask Text",
    "read.disk_cache": "DiskCache",
    "stream.mixed_stream": "MixedStream Share",
    "stream.samples": "Sample SampleSet open",
    "stream.spec": "Batch StreamOptions",
    "stream.stream": "Stream",
    "writer": "Writer",
}
"""The names of each module that needs more than the base requirements."""


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _READER.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with brought_by("read"):
        value = getattr(importlib.import_module(f"shardset.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
