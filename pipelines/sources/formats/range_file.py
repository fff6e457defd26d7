"""One generation of a stored object as a read-only, seekable file,
for libraries that want a file.
"""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import ChangedInput, NotFound, PreconditionFailed, SourceError
from shardset.storage.base import Stat, Storage

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WINDOW_BYTES = 4 << 20


class RangeFile(io.BufferedReader):
    """A file over ranged reads of the object that `stat` tells of; holds at most one window in
    memory.

    A read outside of the buffered window fetches a whole window, so each jump costs up to `window`
    bytes: choose a small one for scattered reads. Any read raises ChangedInput if the object has
    been replaced.

    A bucket keeps a checksum of the object, none of a range. Who reads the object from start to
    end gets SourceError at its end if it is not that of the bytes read.
    """

    def __init__(self, storage: Storage, stat: Stat, window: int = WINDOW_BYTES) -> None:
        super().__init__(Ranges(storage, stat), window)


@dataclass(eq=False)
class Ranges(io.RawIOBase):
    """Each `readinto` is one ranged read; `crc` is of the first `num_summed` bytes."""

    storage: Storage
    stat: Stat
    position: int = 0
    num_summed: int = 0
    crc: int = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = (0, self.position, self.stat.num_bytes)  # of SEEK_SET, SEEK_CUR and SEEK_END
        self.position = starts[whence] + offset
        return self.position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")
        data = self.next_bytes(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """The rest in one ranged read; the base class would read 8 KiB at a time."""
        return self.next_bytes(self.stat.num_bytes)

    def next_bytes(self, num_bytes: int) -> bytes:
        """The next bytes, up to so many; none at the end."""
        start, stop = self.position, min(self.stat.num_bytes, self.position + num_bytes)
        if start >= stop:
            return b""
        self.position = stop
        data = self._read(start, stop)
        if self.stat.crc32c and start <= self.num_summed < stop:
            self.crc = extend_crc32c(self.crc, data[self.num_summed - start :])
            self.num_summed = stop
            crc32c = crc32c_text(self.crc)
            if stop == self.stat.num_bytes and crc32c != self.stat.crc32c:
                raise SourceError(
                    f"{self.storage.url}/{self.stat.name}: read with the CRC32C {crc32c}, expected"
                    f" the bucket's {self.stat.crc32c}; check the network and try again"
                )
        return data

    def _read(self, start: int, stop: int) -> bytes:
        where = f"{self.storage.url}/{self.stat.name}"
        try:
            data = self.storage.read(self.stat.name, start, stop, generation=self.stat.generation)
        except (NotFound, PreconditionFailed) as error:
            raise ChangedInput(
                f"{where}: replaced or removed while it was read ({error}); start again"
            ) from error
        if len(data) != stop - start:
            raise ChangedInput(
                f"{where}: became shorter than {stop} bytes while it was read; start again"
            )
        return data
