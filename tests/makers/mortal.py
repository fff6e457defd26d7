"""A storage whose user dies."""

from shardset.storage.base import ObjectWriter
from shardset.storage.memory import MemoryStorage


class Killed(Exception):
    """The end of a process."""


class Mortal(MemoryStorage):
    """The storage of a process that is killed before its n-th change; `lives` counts down."""

    __slots__ = ("lives",)

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        self._live()
        return super().writer(name, if_generation=if_generation)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        self._live()
        super().delete(name, generation=generation)

    def _live(self) -> None:
        object.__setattr__(self, "lives", self.lives - 1)
        if self.lives < 0:
            raise Killed


def mortal(storage: MemoryStorage, lives: int) -> Mortal:
    """The same objects for a process with so many changes to live."""
    made = Mortal(storage.bucket, "")
    object.__setattr__(made, "lives", lives)
    return made
