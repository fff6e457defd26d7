"""What a step leaves for the next one in the plan's folder, so that between two steps only names go through the runner.

A call of a step writes one object with a part for each receiver, under a name that its work alone decides, as a whole:
trying it again or doing it twice leaves the same object. A receiver reads its part of each object.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from shardset import naming
from shardset.storage import Storage

K = TypeVar("K")

NUM_THREADS = 16
_AT_ONCE = 64


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """The bytes [start, stop) of one object of the plan; 0 to 0 is all of it."""

    name: str
    start: int = 0
    stop: int = 0


def write_parts(output: Storage, name: str, parts: Iterable[tuple[K, bytes | memoryview]]) -> list[tuple[K, Part]]:
    """Where each receiver finds its part, once all of them stand in one object."""
    found, start = [], 0
    with output.writer(name) as out:
        for receiver, data in parts:
            out.write(data)
            found.append((receiver, Part(name, start, start + len(data))))
            start += len(data)
    return found


def read_parts(output: Storage, parts: Iterable[Part]) -> Iterator[bytes]:
    """The bytes of each part, in order; many are on their way at once where that pays. Holds a few of them."""

    def read(part: Part) -> bytes:
        return output.read(part.name, part.start, part.stop or None)

    if not output.url.startswith("gs://"):
        yield from map(read, parts)
        return
    left = iter(parts)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        while some := list(islice(left, _AT_ONCE)):
            yield from pool.map(read, some)


def remove_parts(output: Storage) -> None:
    """Removes all parts: a run that is over needs none."""
    for found in list(output.list(naming.PARTS)):
        output.delete(found.name)
