"""Random augmentation as transforms of a row: `Stream(..., transform=RandAugment())`.

What is drawn depends on the generator alone, which a stream sets by seed, epoch and sample. So it
is the same for any number of processes and threads, and after a resume.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from shardset.decode import operations
from shardset.decode.operations import Operation
from shardset.errors import ConfigError

Row = dict[str, Any]
Drawn = tuple[Operation, float, bool]
"""An operation, its level of 0 to 1, and whether that is negated where the operation is signed."""

MAX_MAGNITUDE = 10
"""The magnitude at which an operation is as strong as it gets."""
_TRIVIAL_LEVELS = 31
_NUM_TRIES = 10

_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "m": ("magnitude", float),
    "n": ("num_ops", int),
    "mstd": ("magnitude_std", float),
    "p": ("probability", float),
    "inc": ("increasing", {"0": False, "1": True}.__getitem__),
}
"""The letters in timm's text: the field of RandAugment, and how its value is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandAugment:
    """Random operations on each image, with timm's magnitudes, operations and defaults.

    torchvision's magnitude of 9 is 3 here, and its probability 1. Call it as the `transform` of a
    stream, or in a Chain: it changes `image` of a row, uint8 [height, width, 3], in place.

    Args:
        num_ops: Operations that are drawn for each image.
        magnitude: Strength of the operations, 0 to 10.
        magnitude_std: Standard deviation of a normal draw around `magnitude`.
        probability: With which each drawn operation is applied, 0 to 1.
        increasing: Uses timm's operations whose effect grows with the magnitude (`inc1`).
        geometric: With False no operation moves pixels: no rotation, shear or translation.

    Raises:
        ConfigError: A value is out of range.

    Examples:
        >>> import shardset
        >>> augment = shardset.RandAugment(magnitude=9, magnitude_std=0.5, increasing=True)
        >>> stream = shardset.Stream(
        ...     "shards", "train", batch_size=8, image_size=32, transform=augment
        ... )
    """

    num_ops: int = 2
    magnitude: float = MAX_MAGNITUDE
    magnitude_std: float = 0.0
    probability: float = 0.5
    increasing: bool = False
    geometric: bool = True

    def __post_init__(self) -> None:
        if (
            self.num_ops < 1
            or not 0 <= self.magnitude <= MAX_MAGNITUDE
            or not 0 <= self.probability <= 1
        ):
            raise ConfigError(
                f"{self}: expected num_ops >= 1, magnitude 0 to {MAX_MAGNITUDE} and probability 0"
                " to 1"
            )

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """Changes `image` of a row, uint8 [height, width, 3], in place; returns the row."""
        return _apply(row, self.draw(rng))

    def draw(self, rng: np.random.Generator) -> list[Drawn]:
        """The operations that an image gets.

        Args:
            rng: The random numbers of the row.

        Returns:
            (operation, level of 0 to 1, whether a signed level is negated) for each.
        """
        table = operations.RAND_INCREASING if self.increasing else operations.RAND
        if not self.geometric:
            table = tuple(each for each in table if each.name not in operations.GEOMETRIC)
        chosen = []
        for _ in range(self.num_ops):
            # Always the same draws, so that an operation left out moves no other.
            number = rng.integers(len(table))
            skip, sign = rng.random(2)
            noise = rng.standard_normal()
            magnitude = min(MAX_MAGNITUDE, max(0.0, self.magnitude + self.magnitude_std * noise))
            if skip < self.probability:
                chosen.append((table[number], magnitude / MAX_MAGNITUDE, bool(sign < 0.5)))
        return chosen


@dataclass(frozen=True, slots=True)
class TrivialAugment:
    """One random operation at a random strength: TrivialAugment in its wide form.

    It has nothing to set. It changes `image` of a row, uint8 [height, width, 3], in place.

    Examples:
        >>> import shardset
        >>> stream = shardset.Stream(
        ...     "shards", "train", batch_size=8, image_size=32, transform=shardset.TrivialAugment()
        ... )
    """

    geometric: ClassVar[bool] = True

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """Changes `image` of a row, uint8 [height, width, 3], in place; returns the row."""
        return _apply(row, self.draw(rng))

    def draw(self, rng: np.random.Generator) -> list[Drawn]:
        """The operation that an image gets.

        Args:
            rng: The random numbers of the row.

        Returns:
            A list of one (operation, level of 0 to 1, whether a signed level is negated).
        """
        number, level = rng.integers(len(operations.TRIVIAL)), rng.integers(_TRIVIAL_LEVELS)
        return [
            (
                operations.TRIVIAL[number],
                float(level / (_TRIVIAL_LEVELS - 1)),
                bool(rng.random() < 0.5),
            )
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomErasing:
    """Noise in a random box of an image, with a probability: timm's rule in its mode `pixel`.

    It changes `image` of a row, uint8 [height, width, 3], in place.

    Args:
        probability: With which an image gets a box, 0 to 1.
        area: The smallest and the largest share of the image's area that a box has.
        min_aspect: The smallest aspect of a box, height to width; its inverse is the largest.
        mean: Mean of the noise, by colour, 0 to 1.
        std: Standard deviation of the noise, by colour, 0 to 1.

    Examples:
        >>> import shardset
        >>> augment = shardset.RandomErasing(probability=0.25)
        >>> stream = shardset.Stream(
        ...     "shards", "train", batch_size=8, image_size=32, transform=augment
        ... )
    """

    probability: float
    area: tuple[float, float] = (0.02, 1 / 3)
    min_aspect: float = 0.3
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """Changes `image` of a row, uint8 [height, width, 3], in place; returns the row."""
        if rng.random() < self.probability:
            self._erase(row["image"], rng)
        return row

    def _erase(self, image: np.ndarray, rng: np.random.Generator) -> None:
        rows, columns = image.shape[:2]
        for _ in range(_NUM_TRIES):
            area = rows * columns * rng.uniform(*self.area)
            aspect = math.exp(rng.uniform(math.log(self.min_aspect), -math.log(self.min_aspect)))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if height < rows and width < columns:
                top, left = rng.integers(rows - height + 1), rng.integers(columns - width + 1)
                noise = rng.standard_normal((height, width, 3), np.float32)
                levels = 255 * (
                    np.array(self.mean, np.float32) + np.array(self.std, np.float32) * noise
                )
                image[top : top + height, left : left + width] = np.clip(np.rint(levels), 0, 255)
                return


@dataclass(frozen=True, slots=True)
class Chain:
    """Transforms of a row, one after the other, with one generator.

    Args:
        transforms: Each is called as `transform(row, rng)` and returns the row for the next one.

    Examples:
        >>> import shardset
        >>> def darker(row, rng):
        ...     return {**row, "image": row["image"] // 2}
        >>> augment = shardset.Chain((shardset.TrivialAugment(), darker))
        >>> stream = shardset.Stream(
        ...     "shards", "train", batch_size=8, image_size=32, transform=augment
        ... )
    """

    transforms: tuple[Callable[[Row, np.random.Generator], Mapping[str, Any]], ...]

    @property
    def geometric(self) -> bool:
        """Whether one of the transforms moves pixels."""
        return any(getattr(each, "geometric", False) for each in self.transforms)

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """The row that the last transform returns."""
        for transform in self.transforms:
            row = dict(transform(row, rng))
        return row


def augmentation_of(text: str) -> RandAugment | TrivialAugment:
    """The augmentation that timm calls `rand-m9-mstd0.5-inc1`, or `trivial`.

    Raises ConfigError for any other text.
    """
    kind, *parts = text.split("-")
    if kind == "trivial" and not parts:
        return TrivialAugment()
    values = {}
    try:
        if kind != "rand":
            raise KeyError(kind)
        for part in parts:
            letters = part.rstrip(".0123456789")
            name, value_of = _FIELDS[letters]
            values[name] = value_of(part.removeprefix(letters))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"augmentation {text!r}: expected trivial, or rand with timm's parts, such as"
            " rand-m9-n2-mstd0.5-p0.5-inc1"
        ) from error
    return RandAugment(**values)


def _apply(row: Row, chosen: list[Drawn]) -> Row:
    """Does the operations to the image of a row, one after the other."""
    if chosen:
        image = Image.fromarray(row["image"])
        for operation, level, is_negated in chosen:
            signed = -level if operation.is_signed and is_negated else level
            image = operation.apply(image, operation.value(signed, image.width))
        row["image"][:] = np.asarray(image)
    return row
