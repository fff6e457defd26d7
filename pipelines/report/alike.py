"""Pure: which images are equal, by size and CRC32C, and which of different splits look alike, by grey versions."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

SIDE = 8
"""Width and height in pixels of the grey versions."""

MIN_ALIKE = 0.92
MIN_CONTRAST = 8
"""Grey versions that span fewer levels are flat, and left out: all flat images are similar."""

ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class DuplicateGroup:
    """Samples with equal images, and over how many splits and labels they spread; these differ in the first samples."""

    samples: list[int]
    num_splits: int
    num_labels: int


@dataclass(frozen=True, slots=True)
class SimilarPair:
    """An image and the one of another split that is most like it; `alike` is at most 1."""

    left: int
    right: int
    alike: float


def equal_images(rows: np.ndarray, candidates: np.ndarray) -> list[DuplicateGroup]:
    """The rows of a catalog with equal images, among `candidates`; groups over several splits first."""
    content = rows["image_crc32c"].astype(np.uint64) << np.uint64(32) ^ rows["image_bytes"].astype(np.uint64)
    _, inverse, counts = np.unique(content[candidates], return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[inverse] > 1)
    order = repeated[np.argsort(inverse[repeated], kind="stable")]
    groups = np.split(candidates[order], np.flatnonzero(np.diff(inverse[order])) + 1) if len(order) else []
    found = [_group(rows, group.tolist()) for group in groups]
    return sorted(found, key=lambda group: (-group.num_splits, -group.num_labels, group.samples))


def _group(rows: np.ndarray, samples: list[int]) -> DuplicateGroup:
    firsts = {(int(rows["split"][sample]), int(rows["label"][sample])): sample for sample in reversed(samples)}
    return DuplicateGroup(
        samples=list(dict.fromkeys([*reversed(firsts.values()), *samples])),
        num_splits=len({split for split, _ in firsts}),
        num_labels=len({label for _, label in firsts}),
    )


def similar_pairs(greys: np.ndarray, splits: np.ndarray) -> list[SimilarPair]:
    """For each image of a smaller split the one of each larger split that is most like it, if alike; closest first.

    `greys` are uint8 [n, SIDE, SIDE]. How alike two images are is the cosine between the steps from each pixel to the
    next ones: a copy that was compressed, resized, brightened or slightly cropped keeps them; other pictures of the
    same layout do not. Compares every image with every other: 50,000 x 10,000 take a few seconds.
    """
    if not len(greys):
        return []
    bright = np.ptp(greys, axis=(1, 2)) >= MIN_CONTRAST
    members = sorted((np.flatnonzero(bright & (splits == number)) for number in np.unique(splits)), key=len)
    units = _steps(greys)
    pairs = (pair for left, right in combinations(members, 2) for pair in _pairs(units, left, right))
    return sorted(pairs, key=lambda pair: (-pair.alike, pair.left))


def _pairs(units: np.ndarray, left: np.ndarray, right: np.ndarray) -> Iterator[SimilarPair]:
    others = units[right].T
    for start in range(0, len(left), ROWS_AT_ONCE):
        rows = left[start : start + ROWS_AT_ONCE]
        cosines = np.round(units[rows] @ others, 4)
        best = cosines.argmax(axis=1)
        for row, column, cosine in zip(rows.tolist(), best.tolist(), cosines.max(axis=1).tolist(), strict=True):
            if cosine >= MIN_ALIKE:
                yield SimilarPair(row, int(right[column]), cosine)


def _steps(greys: np.ndarray) -> np.ndarray:
    """The differences of neighbouring pixels in both directions, as vectors of length 1."""
    levels = greys.astype(np.float32)
    across, down = np.diff(levels, axis=2), np.diff(levels, axis=1)
    steps = np.concatenate((across.reshape(len(levels), -1), down.reshape(len(levels), -1)), axis=1)
    lengths: np.ndarray = np.linalg.norm(steps, axis=1, keepdims=True)
    units: np.ndarray = steps / np.maximum(lengths, 1)
    return units
