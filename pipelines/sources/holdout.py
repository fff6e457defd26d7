"""Splits by keyed hash: whether a sample is held out depends on its own key and the seed, on nothing else."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardset.errors import ConfigError
from shardset.format.naming import is_split
from shardset.order.permutation import derive_key, hash_text
from shardset.storage.base import Storage, join
from shardset.storage.open import is_address, open_file

REST = "train"
"""The split of the samples that are not held out."""


@dataclass(frozen=True, slots=True)
class Holdout:
    """Which samples go to which held-out split: `fractions` by split. Empty: all samples go to `train`.

    Raises ConfigError unless the names can name splits and the fractions are above 0 and below 1 in sum.
    """

    fractions: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for split, fraction in self.fractions.items():
            if not is_split(split) or split == REST:
                raise ConfigError(
                    f"--holdout {split}={fraction}: {split!r} can't be held out; "
                    f"use letters, digits, - and _, not plan or {REST}"
                )
            if not 0 < fraction < 1:
                raise ConfigError(
                    f"--holdout {split}={fraction}: expected a fraction between 0 and 1, such as {split}=0.1"
                )
        if sum(self.fractions.values()) >= 1:
            total = sum(self.fractions.values())
            raise ConfigError(f"--holdout: the fractions add up to {total:g}, which leaves no {REST}")

    def __bool__(self) -> bool:
        return bool(self.fractions)

    def split_of(self, key: str) -> str:
        """The split of one sample. The order in which the fractions are given does not matter."""
        if not self.fractions:
            return REST
        position = hash_text(key, key=derive_key(self.seed, "holdout")) / 2**64
        for split in sorted(self.fractions):
            if position < self.fractions[split]:
                return split
            position -= self.fractions[split]
        return REST

    def empty_notes(self, splits: Iterable[str]) -> Iterator[str]:
        """A sentence for each split that should have samples and has none; `splits` are those that have some."""
        asked = ",".join(f"{split}={fraction:g}" for split, fraction in self.fractions.items())
        for split in sorted({*self.fractions, REST} - {*splits}) if self.fractions else ():
            yield f"--holdout {asked} left no image in split {split}, so there is no such split"


class NamesBelow:
    """The names of files relative to one folder, whichever way the folder and the files are spelled.

    A local folder is identified by device and inode, so symbolic links on the way to it change no name.
    """

    def __init__(self, folder: Storage) -> None:
        self._url = folder.url.rstrip("/")
        self._identity = None if folder.is_remote else _identity(folder.url)
        self._known: dict[str, str | None] = {}

    def name(self, path: str) -> str:
        """The name below the folder of the file at an absolute path or URL; outside of it, its whole address."""
        storage, name = open_file(path)
        if storage.url not in self._known:
            self._known[storage.url] = self._below(storage.url)
        folder = self._known[storage.url]
        return f"{storage.url}/{name}" if folder is None else join(folder, name)

    def _below(self, folder: str) -> str | None:
        """The name of a folder below this one, "" for this one; None if it is elsewhere."""
        if f"{folder}/".startswith(f"{self._url}/"):
            return folder[len(self._url) + 1 :]
        if self._identity is None or is_address(folder):
            return None
        for end in (*[at for at, letter in enumerate(folder) if letter == "/"][1:], len(folder)):
            if (identity := _identity(folder[:end])) is None:
                return None
            if identity == self._identity:
                return folder[end + 1 :]
        return None


def _identity(folder: str) -> tuple[int, int] | None:
    """Device and inode of a folder; None if there is none that can be seen."""
    try:
        stat = os.stat(folder)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
