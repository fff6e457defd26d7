"""Pure: which images are equal, by size and CRC32C, and which of different splits look alike, by
grey versions.
"""

from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

import numpy as np

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


def equal_images(rows: np.ndarray, candidates: np.ndarray) -> list[DuplicateGroup]:
    """The rows of a catalog with equal images, among `candidates`; groups of several labels
    first.
    """
    content = rows["image_crc32c"].astype(np.uint64) << np.uint64(32) ^ rows["image_bytes"].astype(
        np.uint64
    )
    _, inverse, counts = np.unique(content[candidates], return_inverse=True, return_counts=True)
    is_repeated = counts[inverse] > 1
    groups = defaultdict[int, list[int]](list)
    for number, sample in zip(
        inverse[is_repeated].tolist(), candidates[is_repeated].tolist(), strict=True
    ):
        groups[number].append(sample)
    found = [_spread(rows, samples) for samples in groups.values()]
    return sorted(found, key=lambda group: (-group.num_labels, -group.num_splits, group.samples))


def _spread(rows: np.ndarray, samples: list[int]) -> DuplicateGroup:
    """The group of these samples, with one of each split and label first."""
    kinds = rows[["split", "label"]][samples].tolist()
    firsts = dict(zip(reversed(kinds), reversed(samples), strict=True))
    splits, labels = map(set, zip(*firsts, strict=True))
    in_order = dict.fromkeys([*reversed(firsts.values()), *samples])
    return DuplicateGroup(list(in_order), len(splits), len(labels))


def similar_pairs(greys: np.ndarray, splits: np.ndarray) -> list[SimilarPair]:
    """For each image of a smaller split the one of each larger split that is most like it, if
    alike; closest first.

    `greys` are uint8 [n, SIDE, SIDE]. How alike two images are is the cosine between the steps from
    each pixel to the next ones: a copy that was compressed, resized, brightened or slightly cropped
    keeps them; other pictures of the same layout do not. Compares every image with every other:
    50,000 x 10,000 take a few seconds.
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
                    pairs.append(SimilarPair(row, other, cosine))
    return sorted(pairs, key=lambda pair: (-pair.alike, pair.left))
