"""Pure: the divisors and multiples of a number that are nearest to a wish."""

import math
from collections.abc import Sequence


def nearest_divisors(number: int, wish: int) -> list[int]:
    """The largest divisor of `number` up to `wish` and the smallest above it, where they exist."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    return [*[n for n in divisors if n <= wish][-1:], *[n for n in divisors if n > wish][:1]]


def nearest_multiples(number: int, wish: int) -> list[int]:
    """The largest multiple of `number` up to `wish`, if it is not 0, and the smallest above it."""
    below = wish // number * number
    return [n for n in (below, below + number) if n]


def or_list(numbers: Sequence[int]) -> str:
    """`512 or 768`."""
    return " or ".join(f"{number:,}" for number in numbers)
