"""A split by keyed hash: which samples are held out depends on their own keys and the seed, on nothing else."""

import os
from collections.abc import Iterable, Iterator, Mapping

from shardset.errors import ConfigError
from shardset.format.naming import is_split
from shardset.order.permutation import derive_key, hash_text
from shardset.storage.base import Storage, join
from shardset.storage.open import is_address, open_file

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


class NamesBelow:
    """What files are called below one folder, whichever way the folder and the files are spelled.

    A local folder is known by device and inode, so symbolic links on the way to it change no name.
    """

    def __init__(self, folder: Storage) -> None:
        self._url = folder.url.rstrip("/")
        self._identity = None if folder.is_remote else _identity(folder.url)
        self._known: dict[str, str | None] = {}

    def name(self, path: str) -> str:
        """The name below the folder of the file at an absolute path or address; outside of it, its whole address."""
        storage, name = open_file(path)
        if storage.url not in self._known:
            self._known[storage.url] = self._below(storage.url)
        folder = self._known[storage.url]
        return f"{storage.url}/{name}" if folder is None else join(folder, name)

    def _below(self, folder: str) -> str | None:
        """The name of a folder below this one, "" of itself; None if it stands elsewhere."""
        if f"{folder}/".startswith(f"{self._url}/"):
            return folder[len(self._url) + 1 :]
        if self._identity is None or is_address(folder):
            return None
        for end in (*[at for at, letter in enumerate(folder) if letter == "/"][1:], len(folder)):
            if (found := _identity(folder[:end])) is None:
                return None
            if found == self._identity:
                return folder[end + 1 :]
        return None


def _identity(folder: str) -> tuple[int, int] | None:
    """What a folder is, by whichever name; None where there is none to be seen."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino
