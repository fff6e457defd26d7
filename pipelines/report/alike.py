"""Pure: which images are equal, by size and CRC32C, and which of different splits look alike, by
grey versions.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardset.read.query import repeated

SIDE = 8
"""Width and height in pixels of the grey versions."""

MIN_ALIKE = 0.92
MIN_CONTRAST = 8
"""Grey versions that span fewer levels are flat, and left out: all flat images are similar."""

ROWS_AT_ONCE = 256


class DuplicateGroup(NamedTuple):
    """Samples with equal images, and over how many splits and labels they spread; these differ in
    the first samples.
    """

    samples: list[int]
    num_splits: int
    num_labels: int


class SimilarPair(NamedTuple):
    """An image and the one of another split that is most like it; `alike` is at most 1."""

    left: int
    right: int
    alike: float


def equal_images(samples: pa.Table) -> list[DuplicateGroup]:
    """The rows of a catalog with equal images, without repeats that the build made; groups of
    several labels first.
    """
    is_original = (pc.field("image.bytes") > 0) & (pc.field("copy") == 0)
    # first the few of a CRC32C that occurs again: groups of all samples would take long
    is_repeated = pc.field("image_crc32c").isin(repeated(samples["image_crc32c"]))
    facts = ["row", "split", "label"]
    groups = (
        samples.filter(is_original & is_repeated)
        .group_by(["image_crc32c", "image.bytes"], use_threads=False)
        .aggregate([(name, "list") for name in facts])
        .filter(pc.list_value_length(pc.field("row_list")) > 1)
    )
    columns = (groups[f"{name}_list"].to_pylist() for name in facts)
    duplicates = list(map(_spread, *columns))
    return sorted(
        duplicates, key=lambda group: (-group.num_labels, -group.num_splits, group.samples)
    )


def _spread(rows: list[int], splits: list[str], labels: list[int]) -> DuplicateGroup:
    """The group of these rows, with one of each split and label first."""
    kinds = zip(reversed(splits), reversed(labels), strict=True)
    firsts = dict(zip(kinds, reversed(rows), strict=True)).values()
    return DuplicateGroup(
        list(dict.fromkeys([*reversed(firsts), *rows])), len({*splits}), len({*labels})
    )


def similar_pairs(
    images: Sequence[int], greys: np.ndarray, splits: np.ndarray
) -> list[SimilarPair]:
    """For each image of a smaller split the one of each larger split that is most like it, if
    alike; closest first.

    `greys` are uint8 [n, SIDE, SIDE], and `splits` names each image's. How alike two images are is
    the cosine between the steps from each pixel to the next ones: a copy that was compressed,
    resized, brightened or slightly cropped keeps them; other pictures of the same layout do not.
    Compares every image with every other: 50,000 x 10,000 take a few seconds.
    """
    levels = greys.astype(np.float32)
    shape = len(levels), SIDE * (SIDE - 1)
    steps = np.concatenate([np.diff(levels, axis=axis).reshape(shape) for axis in (2, 1)], axis=1)
    units = steps / np.maximum(np.linalg.norm(steps, axis=1, keepdims=True), 1)
    bright = np.ptp(greys, axis=(1, 2)) >= MIN_CONTRAST
    members = sorted(
        (np.flatnonzero(bright & (splits == number)) for number in np.unique(splits)), key=len
    )
    pairs = []
    for left, right in combinations(members, 2):
        others = units[right].T
        for start in range(0, len(left), ROWS_AT_ONCE):
            rows = left[start : start + ROWS_AT_ONCE]
            cosines = np.round(units[rows] @ others, 4)
            best, alike = cosines.argmax(axis=1), cosines.max(axis=1)
            for row, other, cosine in zip(
                rows.tolist(), right[best].tolist(), alike.tolist(), strict=True
            ):
                if cosine >= MIN_ALIKE:
                    pairs.append(SimilarPair(images[row], images[other], cosine))
    return sorted(pairs, key=lambda pair: (-pair.alike, pair.left))
