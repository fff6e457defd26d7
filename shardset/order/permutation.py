"""An order as arithmetic: a keyed 64-bit hash and a keyed permutation of `range(n)`.

The vectors in `tests/shardset/order/test_permutation.py` fix both for ever. No library generator is
involved, because libraries don't promise stable streams.

The hash chains the SplitMix64 finalizer (Steele, Lea, Flood 2014: "Fast splittable pseudorandom
number generators"). The permutation is a balanced 4-round Feistel network over the smallest even
number of bits, at least 8, that holds `n`, with cycle walking (Black, Rogaway 2002: "Ciphers with
arbitrary finite domains").
"""

import hashlib
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION = 1
"""Raise it whenever any of the numbers below, or the epoch order built on them, changes."""


class Purpose(IntEnum):
    """The purpose of a hash of (seed, epoch, purpose, ...), so that no two decisions share bits."""

    PHASE = 1
    BLOCK = 2
    SHUFFLE = 3
    SLOT = 4
    TRANSFORM = 5


Round = Callable[[NDArray[np.int64]], NDArray[np.int64]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
_ROUNDS = 4
_MIN_HALF_BITS = 4  # on fewer bits, four rounds visibly prefer some results


def hash64(*words: Any) -> Any:
    """A 64-bit hash of a sequence of integers; any word may be an array, then the result is one
    (uint64).

    Words are taken modulo 2**64. Returns an int if all words are ints, else a uint64 array of the
    broadcast shape.
    """
    x: Any = 0
    for word in words:
        if isinstance(x, int) and isinstance(word, int):
            x = ((x ^ (word & _MASK)) + _GOLDEN) & _MASK
            x = ((x ^ (x >> 30)) * _MUL1) & _MASK
            x = ((x ^ (x >> 27)) * _MUL2) & _MASK
            x ^= x >> 31
            continue
        x = _uint64(x) ^ _uint64(word)
        x += np.uint64(_GOLDEN)
        x ^= x >> np.uint64(30)
        x *= np.uint64(_MUL1)
        x ^= x >> np.uint64(27)
        x *= np.uint64(_MUL2)
        x ^= x >> np.uint64(31)
    return x


def derive_key(seed: int, *names: int | str) -> int:
    """A 64-bit key for one purpose: `derive_key(seed, "holdout", "test")`."""
    return int(
        hash64(seed, *(name if isinstance(name, int) else hash_text(name, key=0) for name in names))
    )


def hash_text(text: str, *, key: int) -> int:
    """A keyed 64-bit hash of a text (BLAKE2b over its UTF-8 bytes)."""
    digest = hashlib.blake2b(
        text.encode("utf-8", "surrogateescape"), digest_size=8, key=key.to_bytes(8, "little")
    )
    return int.from_bytes(digest.digest(), "little")


def permute(positions: NDArray[np.int64], *, n: int, key: int) -> NDArray[np.int64]:
    """Where a keyed permutation of `range(n)` sends each position; of the same shape."""
    for extreme in (int(positions.min()), int(positions.max())) if positions.size else ():
        if not 0 <= extreme < n:
            raise ValueError(f"position {extreme} is outside [0, {n})")
    half = max(_MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2)
    rounds = [_round(key, number, half, positions.size) for number in range(_ROUNDS)]
    values = _network(positions.astype(np.int64), rounds, half)
    outside = np.flatnonzero(values >= n)
    # cycle walking: ends, because the network permutes a finite set that holds the positions
    while outside.size:
        again = _network(values[outside], rounds, half)
        values[outside] = again
        outside = outside[again >= n]
    return values


def _uint64(word: Any) -> NDArray[np.uint64]:
    # At least one dimension: a NumPy scalar warns when it wraps around, an array does not, and a
    # hash must wrap.
    if isinstance(word, int):
        return np.array([word & _MASK], dtype=np.uint64)
    return np.asarray(word).astype(np.uint64, copy=False)


def _round(key: int, number: int, half: int, num_values: int) -> Round:
    """The function of a round: a table if there are at least as many values as it has results."""

    def function(value: NDArray[np.int64]) -> NDArray[np.int64]:
        mixed: NDArray[np.uint64] = hash64(key, number, value)
        return (mixed & np.uint64((1 << half) - 1)).astype(np.int64)

    return function(np.arange(1 << half)).__getitem__ if num_values >= 1 << half else function


def _network(values: NDArray[np.int64], rounds: Iterable[Round], half: int) -> NDArray[np.int64]:
    left, right = values >> half, values & ((1 << half) - 1)
    for function in rounds:
        left, right = right, left ^ function(right)
    return (left << half) | right
