"""Pure: finds equal and nearly equal images. Arrays in, groups and pairs out.

Equal images have equal size and CRC32C, which the indexes hold for every sample. Nearly equal images have similar
64-bit difference hashes (is each cell of a 9x8 grid brighter than its left neighbour?) and highly correlated small grey
versions: hashes alone would also match pictures that merely have the same layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

GREY_HEIGHT, GREY_WIDTH = 16, 18
MAX_DISTANCE = 6
MIN_CORRELATION = 0.95
MIN_CONTRAST = 8
"""Grey versions that span fewer levels are flat, and left out: all flat images are similar."""

_BITS = 64


@dataclass(frozen=True, slots=True)
class SimilarPair:
    """The numbers of an image and of the one of another split that is most like it; `distance` in bits of 64."""

    left: int
    right: int
    distance: int
    correlation: float


def equal_groups(crc: np.ndarray, num_bytes: np.ndarray) -> list[np.ndarray]:
    """Groups of at least two images with the same CRC32C and size, ascending, ordered by their first member."""
    both = (np.asarray(crc).astype(np.uint64) << np.uint64(32)) ^ np.asarray(num_bytes).astype(np.uint64)
    order = np.argsort(both, kind="stable")
    ends = np.flatnonzero(np.diff(both[order], prepend=~both[order[:1]], append=~both[order[-1:]]))
    groups = [order[ends[run] : ends[run + 1]] for run in np.flatnonzero(np.diff(ends) > 1).tolist()]
    return sorted(groups, key=lambda group: int(group[0]))


def hashes(greys: np.ndarray) -> np.ndarray:
    """The difference hashes of uint8 [n, 16, 18] as rows of 64 bits, bool [n, 64]."""
    cells = greys.reshape(len(greys), 8, 2, 9, 2).astype(np.uint16).sum(axis=(2, 4))
    bits: np.ndarray = cells[:, :, 1:] > cells[:, :, :-1]
    return bits.reshape(len(greys), _BITS)


def similar_pairs(greys: np.ndarray, splits: np.ndarray, *, num_rows: int = 256) -> list[SimilarPair]:
    """For each image of a smaller split, the most similar one of each larger split, if similar enough; closest first.

    Compares every hash with every other, `num_rows` at a time, as a product of matrices: 50,000 x 10,000 take a few
    seconds.
    """
    if not len(greys):
        return []
    bright = np.ptp(greys.reshape(len(greys), -1), axis=1) >= MIN_CONTRAST
    members = sorted((np.flatnonzero(bright & (splits == number)) for number in np.unique(splits)), key=len)
    # The product of two rows of signs is the number of equal bits less the number of different ones.
    signs = np.where(hashes(greys), np.float32(1), np.float32(-1))
    units = _units(greys)
    pairs: list[SimilarPair] = []
    for left, right in combinations(members, 2):
        others = signs[right].T
        for start in range(0, len(left), num_rows):
            rows = left[start : start + num_rows]
            pairs += _most_similar(units, signs[rows] @ others, rows, right)
    return sorted(pairs, key=lambda pair: (pair.distance, -pair.correlation, pair.left))


def _most_similar(
    units: np.ndarray, products: np.ndarray, rows: np.ndarray, right: np.ndarray
) -> Iterator[SimilarPair]:
    """For each image of `rows` the most correlated one of `right` within the distance; `products` are of signs."""
    near = products >= _BITS - 2 * MAX_DISTANCE
    columns = np.flatnonzero(near.any(axis=0))
    if not len(columns):
        return
    # For pictures of one layout, nearly all hashes are near, so the correlations are a matrix product too.
    correlations = np.round(units[rows] @ units[right[columns]].T, 4)
    best = np.where(near[:, columns], correlations, -1).argmax(axis=1)
    for row, (column, at) in enumerate(zip(columns[best].tolist(), best.tolist(), strict=True)):
        if near[row, column] and correlations[row, at] >= MIN_CORRELATION:
            distance = int(_BITS - products[row, column]) // 2
            yield SimilarPair(int(rows[row]), int(right[column]), distance, round(float(correlations[row, at]), 4))


def _units(greys: np.ndarray) -> np.ndarray:
    """Grey versions as vectors whose products are their correlations; a version of one level is zero."""
    levels = greys.reshape(len(greys), GREY_HEIGHT * GREY_WIDTH).astype(np.float32)
    levels -= levels.mean(axis=1, keepdims=True)
    lengths: np.ndarray = np.linalg.norm(levels, axis=1, keepdims=True)
    levels /= np.maximum(lengths, 1)
    return levels
