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
    """The facts of a split, from its first images.

    Raises ConfigError if no image can be decoded.
    """
    sizes, is_grey = [], True
    with SampleSet(loaded, split_name) as samples:
        for sample in samples.__getitems__(range(min(NUM_IMAGES, len(samples)))):
            with suppress(UndecodableImage):
                pixels = decode(sample.bytes, (32, 32))
                sizes.append(image_size(sample.bytes))
                is_grey &= bool((pixels == pixels[..., :1]).all())
    if not sizes:
        raise ConfigError(
            f"{loaded.storage.url}: none of the first images of {split_name!r} can be decoded;"
            " name a --recipe"
        )
    side = median_low(map(min, sizes))
    return SetFacts(
        num_samples=len(samples),
        num_classes=len(samples.classes),
        side=side,
        is_uniform=set(sizes) == {(side, side)},
        is_grey=is_grey,
    )
