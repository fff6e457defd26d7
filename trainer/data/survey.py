"""A look at the first training images, for runs whose settings follow from the shard set."""

from contextlib import suppress
from dataclasses import dataclass
from statistics import median_low

from shardset.decode.image import decode, image_size
from shardset.errors import ConfigError, UndecodableImage
from shardset.format.manifest import LoadedSet
from shardset.stream.samples import SampleSet

NUM_IMAGES = 64
"""Images to look at. A shard holds a random mix of its split, so the first ones stand for all."""
READ_BYTES = 16 << 20
"""About what they may have together: of large images fewer are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFacts:
    """A training split: its size, and the median shorter side of its images in pixels.

    `is_uniform`: all images that were looked at are squares of that side. `is_grey`: none has a colour.
    """

    num_samples: int
    num_classes: int
    side: int
    is_uniform: bool
    is_grey: bool


def survey(loaded: LoadedSet, split_name: str) -> SetFacts:
    """The facts of a split, from its first samples.

    Raises ConfigError if no image of them can be decoded.
    """
    split, sizes, is_grey = loaded.manifest.split(split_name), [], True
    with SampleSet(loaded, split_name) as samples:
        most = max(1, READ_BYTES * split.num_samples // split.num_tar_bytes)
        for sample in samples.__getitems__(range(min(NUM_IMAGES, most, len(samples)))):
            with suppress(UndecodableImage):
                pixels = decode(sample.bytes, (32, 32))
                sizes.append(image_size(sample.bytes))
                is_grey &= bool((pixels == pixels[..., :1]).all())
    if not sizes:
        found = f"no image at the beginning of {split_name!r} can be decoded"
        raise ConfigError(f"{loaded.storage.url}: {found}; name a --recipe")
    side = median_low(map(min, sizes))
    return SetFacts(
        num_samples=len(samples),
        num_classes=len(loaded.manifest.classes),
        side=side,
        is_uniform=set(sizes) == {(side, side)},
        is_grey=is_grey,
    )
