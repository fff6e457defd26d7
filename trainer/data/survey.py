"""A look at the first training images, for runs whose settings follow from the shard set."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from statistics import median_low

from shardset.decode.image import decode, image_size
from shardset.errors import ConfigError, UndecodableImage
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.index import index_fields
from shardset.format.manifest import LoadedSet, Shard, Split
from shardset.read.indexes import read_rows
from shardset.storage.base import Storage

NUM_IMAGES = 64
"""Images to look at. A shard holds a random mix of its split, so the first ones stand for all."""
READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFacts:
    """A training split: its size, and the median shorter side of its images in pixels.

    `is_uniform`: all images that were looked at are squares of that side. `is_grey`: none has a
    colour.
    """

    num_samples: int
    num_classes: int
    side: int
    is_uniform: bool
    is_grey: bool


def survey(loaded: LoadedSet, split_name: str) -> SetFacts:
    """The facts of a split, from one index and one read.

    Raises ConfigError if no image can be decoded.
    """
    manifest, storage = loaded.manifest, loaded.storage
    split = manifest.split(split_name)
    shard = split.shards[0]
    sizes, is_grey = [], True
    for data in _first_images(storage, split, shard):
        with suppress(UndecodableImage):
            pixels = decode(data, (32, 32))
            sizes.append(image_size(data))
            is_grey &= bool((pixels == pixels[..., :1]).all())
    if not sizes:
        raise ConfigError(
            f"{storage.url}/{shard.path}: no image at its beginning can be decoded; name a --recipe"
        )
    side = median_low(map(min, sizes))
    return SetFacts(
        num_samples=loaded.part(split_name).selection.num_kept,
        num_classes=len(manifest.classes),
        side=side,
        is_uniform=set(sizes) == {(side, side)},
        is_grey=is_grey,
    )


def _first_images(storage: Storage, split: Split, shard: Shard) -> Iterator[bytes]:
    """The images of the first samples of a shard, as many as one read of `READ_BYTES` holds; at
    least one.
    """
    rows = read_rows(
        storage, shard, split.index_fields(0), range(min(NUM_IMAGES, shard.num_samples))
    )
    columns = [f".{name}" for name in index_fields(rows) if name in FIELD_OF_EXTENSION]
    pairs = [
        next((row[column] for column in columns if row[column]["offset"]), None) for row in rows
    ]
    ranges = [
        (int(pair["offset"]), int(pair["offset"] + pair["num_bytes"]))
        for pair in pairs
        if pair is not None
    ]
    if not ranges:
        return
    start = ranges[0][0]
    within = [one for one in ranges if one[1] <= start + READ_BYTES] or ranges[:1]
    data = storage.read(shard.path, start, max(stop for _, stop in within))
    yield from (data[first - start : stop - start] for first, stop in within)
