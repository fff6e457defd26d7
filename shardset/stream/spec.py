"""What a stream reads and how, checked where it is born."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar, get_args

import numpy as np

from shardset.decode.image import ImageSpec
from shardset.decode.targets import Target
from shardset.errors import ConfigError
from shardset.format.manifest import LoadedSet, SetUrl
from shardset.order.budget import PREFETCH, OrderOptions
from shardset.order.epoch import LastBatch
from shardset.order.lanes import check_world, rank_part
from shardset.read.disk_cache import DiskCache
from shardset.stream.world import num_own_cores

# No TypedDict, which would refuse the names that fields, columns and a transform bring.
Batch = dict[str, Any]
"""One batch: a dict of arrays and lists by name. `Stream.__iter__` lists the names."""

F = TypeVar("F", bound=Callable[..., Any])

BadSamples = Literal["raise", "mask"]

RowTransform = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]
"""A change of a row, `transform(row, rng)`; `Stream` says what it gets and what it may return."""


class MixedOptions(TypedDict, total=False):
    """The options that a Stream and a MixedStream share; `Stream` says what they mean."""

    fields: Sequence[str]
    columns: Sequence[str]
    with_key: bool
    block_size: int | None
    window: int | None
    augment_repeats: int
    bad_samples: BadSamples
    num_threads: int | None
    prefetch: int
    disk_cache: DiskCache | None
    transform: RowTransform | None
    targets: Mapping[str, Target]
    views: Mapping[str, tuple[int, ImageSpec]]
    with_matrix: bool


class StreamOptions(MixedOptions, total=False):
    """The options of a Stream that have a default, for code that passes them on.

    `Stream` says what they mean.

    Examples:
        >>> import shardset
        >>> options: shardset.StreamOptions = {"prefetch": 4, "last_batch": "drop"}
        >>> stream = shardset.Stream("shards", "train", batch_size=8, image_size=32, **options)
    """

    num_lanes: int | None
    last_batch: LastBatch
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec(OrderOptions):
    """One replica's (or host's) part of the batches of a split.

    `Stream` says what the options mean. A mixture gives each set `part`, the slots that are this
    process's, in place of an even share. `manifest_url` may also be the set that `shardset.load`
    returned, so that several streams read one manifest once. Raises ConfigError where the values do
    not fit.
    """

    manifest_url: SetUrl
    split: str
    rank: int
    image: ImageSpec | None
    part: range | None = None
    fields: Sequence[str] = ()
    columns: Sequence[str] = ()
    with_key: bool = False
    bad_samples: BadSamples = "raise"
    num_threads: int | None = None
    prefetch: int = PREFETCH
    disk_cache: DiskCache | None = None
    transform: RowTransform | None = None
    targets: Mapping[str, Target] = field(default_factory=dict)
    views: Mapping[str, tuple[int, ImageSpec]] = field(default_factory=dict)
    with_matrix: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.manifest_url, LoadedSet):
            object.__setattr__(self, "manifest_url", os.fspath(self.manifest_url))
        OrderOptions.__post_init__(self)  # a dataclass with slots has no plain super()
        check_world(self.global_batch_size, self.rank, self.world_size)
        if self.image is not None and not isinstance(self.image, ImageSpec):
            raise ConfigError(
                f"image is {self.image!r}, expected ImageSpec(size=...), or None to decode nothing"
            )
        for name, value in (("fields", self.fields), ("columns", self.columns)):
            if isinstance(value, str):
                raise ConfigError(f"{name} is {value!r}, expected several, such as ({value!r},)")
        self._check_crops()

    def _check_crops(self) -> None:
        """Raises ConfigError where views, targets and transform do not go together."""
        for name, view in self.views.items():
            match view:
                case int(number), ImageSpec(flip=False | "pixels") if number > 0:
                    continue
            raise ConfigError(
                f"views {name!r} are {view!r}, expected (number, ImageSpec(...)) with at least 1"
                " and flip False or 'pixels'"
            )
        for name, target in self.targets.items():
            if not isinstance(target, Target):
                raise ConfigError(f"target {name!r} is {target!r}, expected Boxes, Mask or Text")
        if len({(image.background, image.upright) for _, image in self.views.values()}) > 1:
            raise ConfigError("views differ in background or upright; give all the same")
        if self.views and self.image is not None:
            raise ConfigError("image and views are both given; name the image's crop as a view")
        if self.follows_crop and self.image is None:
            raise ConfigError("targets and with_matrix follow the crop of `image`; give image")
        if self.follows_crop and getattr(self.transform, "geometric", False):
            raise ConfigError(
                f"{self.transform} moves pixels and not the targets or the matrix; use"
                " RandAugment(geometric=False), or move all of them in a transform"
            )
        images = [self.image] if self.image else [image for _, image in self.views.values()]
        if self.seed is None and any(image.is_random for image in images):
            raise ConfigError(
                "the stored order (seed None) takes no random crop or flip; use CenterCrop, or give"
                " a seed"
            )

    @property
    def slots(self) -> range:
        """The slots of the global batch that this replica takes."""
        if self.part is not None:
            return self.part
        return rank_part(self.global_batch_size, self.rank, self.world_size)

    @property
    def decodes(self) -> bool:
        """Whether the stream decodes images."""
        return self.image is not None or bool(self.views)

    @property
    def follows_crop(self) -> bool:
        """Whether something in the batch depends on where the image lies in its row."""
        return self.with_matrix or bool(self.targets)

    def empty_rows(self, num_rows: int) -> Batch:
        """What decoding fills, as it is in a bad sample: black images, no targets."""
        rows: Batch = {}
        if self.image is not None:
            size = self.image.size
            rows["image"] = np.zeros((num_rows, size, size, 3), np.uint8)
            for name, target in self.targets.items():
                rows |= {name + end: empty for end, empty in target.empty(num_rows, size).items()}
        if self.with_matrix:
            rows["matrix"] = np.zeros((num_rows, 2, 3), np.float32)
            rows["orig_size"] = np.zeros((num_rows, 2), np.int32)
        for name, (number, image) in self.views.items():
            rows[name] = np.zeros((num_rows, number, image.size, image.size, 3), np.uint8)
        return rows

    @property
    def keeps_images(self) -> bool:
        """Whether decoded images may be kept: for a random crop that does not resize, where nothing
        else is read.

        Evaluation sees each image once, so it keeps none.
        """
        image = self.image
        if image is None or self.fields or self.columns or self.with_key or self.follows_crop:
            return False
        return image.crop.num_draws > 0 and image.crop.keeps_size(image.size)

    @property
    def num_decode_threads(self) -> int:
        """Threads that decode: `num_threads`, or one for each core that is this process's share."""
        return self.num_threads or num_own_cores()


def lists_options(function: F) -> F:
    """Has `help` list the options behind `**options`, with their types and defaults in
    StreamSpec.
    """
    signature, of_spec = inspect.signature(function), inspect.signature(StreamSpec).parameters
    *named, options = signature.parameters.values()
    listed = [of_spec[name] for name in get_args(options.annotation)[0].__annotations__]
    shown = signature.replace(parameters=[*named, *listed])
    function.__signature__ = shown  # type: ignore[attr-defined]
    return function
