"""A split by keyed hash: which samples are held out depends on their own keys and the seed, on nothing else."""

from collections.abc import Iterable, Iterator, Mapping

from shardset.errors import ConfigError
from shardset.naming import is_split
from shardset.permutation import derive_key, hash_text

REST = "train"
"""The split of what is not held out."""


def check_holdout(holdout: Mapping[str, float]) -> None:
    """Raises ConfigError unless names can name splits and fractions are above 0 and below 1 in sum."""
    for split, fraction in holdout.items():
        if not is_split(split) or split == REST:
            raise ConfigError(
                f"--holdout {split}={fraction}: {split!r} can't be held out; "
                f"use letters, digits, - and _, not plan or {REST}"
            )
        if not 0 < fraction < 1:
            raise ConfigError(f"--holdout {split}={fraction}: expected a fraction between 0 and 1, such as {split}=0.1")
    if sum(holdout.values()) >= 1:
        raise ConfigError(f"--holdout: the fractions add up to {sum(holdout.values()):g}, which leaves no {REST}")


def empty_notes(holdout: Mapping[str, float], splits: Iterable[str]) -> Iterator[str]:
    """A sentence for each split that should have samples and has none; `splits` are those that have some."""
    asked = ",".join(f"{split}={fraction:g}" for split, fraction in holdout.items())
    for split in sorted({*holdout, REST} - {*splits}) if holdout else ():
        yield f"--holdout {asked} left no image in split {split}, so there is no such split"


def split_of(key: str, holdout: Mapping[str, float], seed: int) -> str:
    """The split of one sample; the order in which `holdout` names its splits does not matter."""
    if not holdout:
        return REST
    place = hash_text(key, key=derive_key(seed, "holdout")) / 2**64
    for split in sorted(holdout):
        if place < holdout[split]:
            return split
        place -= holdout[split]
    return REST
