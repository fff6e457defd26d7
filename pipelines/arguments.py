"""Parses values of the command line: each function takes one argument, and raises ArgumentTypeError
if it is wrong.
"""

import argparse
from typing import Any, NoReturn

from shardset.errors import ConfigError
from shardset.format.images import background as backgrounds
from shardset.format.images.background import Background

MAX_RANGE = 1_000_000
"""Limit of one range of --only-shards: it becomes a set in memory."""


def positive(text: str, expected: str = "a whole number from 1") -> int:
    """`8` as 8."""
    if not text.isdecimal() or int(text) < 1:
        _fail(text, expected)
    return int(text)


def numbers(text: str) -> dict[str, int]:
    """`8` as {"": 8}; `train=8,test=2` as a number for each split."""
    expected = "a whole number from 1, or SPLIT=NUMBER,SPLIT=NUMBER"
    return {split: positive(number, expected) for split, number in _pairs(text)}


def fractions(text: str) -> dict[str, float]:
    """`val=0.1,test=0.1` as a fraction for each split."""
    try:
        found = {split: float(fraction) for split, fraction in _pairs(text)}
    except ValueError:
        found = {"": 0.0}
    return _fail(text, "SPLIT=FRACTION, for example test=0.1") if "" in found else found


def shorter_side(text: str) -> int:
    """`shorter=256` as 256."""
    name, _, number = text.partition("=")
    if name != "shorter":
        _fail(text, "shorter=N, for example shorter=256")
    return positive(number)


def background(text: str) -> Background:
    """A colour as three numbers."""
    try:
        return backgrounds.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def shard_numbers(text: str) -> frozenset[tuple[str, int]]:
    """`train:0,4-7;test:1` as (split, shard number) pairs."""
    shards: set[tuple[str, int]] = set()
    for listed in text.split(";"):
        split, _, ranges = listed.partition(":")
        for piece in ranges.split(","):
            first, _, last = piece.partition("-")
            last = last or first
            is_range = split and first.isdigit() and last.isdigit()
            if not is_range or not 0 <= int(last) - int(first) < MAX_RANGE:
                _fail(
                    text,
                    "SPLIT:NUMBERS;..., for example train:0,4-7 (a range ascends, at most"
                    f" {MAX_RANGE} long)",
                )
            shards |= {(split, number) for number in range(int(first), int(last) + 1)}
    return frozenset(shards)


class Merge(argparse.Action):
    """Merges the values of a flag that is given several times. The last one of a split counts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: object,
        values: Any,
        option_string: Any = None,
    ) -> None:
        setattr(namespace, self.dest, getattr(namespace, self.dest) | values)


def _pairs(text: str) -> list[tuple[str, str]]:
    """`a=1,b=2`, or `3` for all splits, as pairs."""
    pairs = [
        (split, value) for split, _, value in (piece.rpartition("=") for piece in text.split(","))
    ]
    if len(dict(pairs)) < len(pairs):
        _fail(text, "one value for each split")
    return pairs


def _fail(text: str, expected: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
