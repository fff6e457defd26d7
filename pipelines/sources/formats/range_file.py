"""One generation of a stored object as a read-only, seekable file, for libraries that want a file."""

import io
from typing import TYPE_CHECKING

from shardset.errors import ChangedInput, NotFound, PreconditionFailed
from shardset.storage.base import Storage
from shardset.storage.checked import read_same_twice

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WINDOW_BYTES = 4 << 20


class RangeFile(io.BufferedReader):
    """A file over ranged reads of `num_bytes` bytes of one generation; holds at most one window in memory.

    A read outside of the buffered window fetches a whole window, so each jump costs up to `window` bytes: choose a
    small one for scattered reads. Any read raises ChangedInput if the object has been replaced.

    A bucket keeps a checksum of the whole object, none of a range. With `twice`, a range from a bucket is read until
    two reads agree: for content whose format has no checksum, and which nothing compares later.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        generation: str,
        num_bytes: int,
        window: int = WINDOW_BYTES,
        *,
        twice: bool = False,
    ) -> None:
        super().__init__(_Ranges(storage, name, generation, num_bytes, twice and storage.is_remote), window)


class _Ranges(io.RawIOBase):
    """Each `readinto` is one ranged read."""

    def __init__(self, storage: Storage, name: str, generation: str, num_bytes: int, twice: bool) -> None:
        self._storage, self._name, self._generation = storage, name, generation
        self._num_bytes, self._position, self._twice = num_bytes, 0, twice

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence] + offset
        if position < 0:
            raise ValueError(f"position {position} is before the start of {self._name}")
        self._position = position
        return position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")
        start, stop = self._position, min(self._num_bytes, self._position + len(view))
        if start >= stop:
            return 0
        view[: stop - start] = self._fetch(start, stop)
        self._position = stop
        return stop - start

    def readall(self) -> bytes:
        """The rest in one ranged read; the base class would read 8 KiB at a time."""
        start, self._position = self._position, max(self._position, self._num_bytes)
        return self._fetch(start, self._num_bytes) if start < self._num_bytes else b""

    def _fetch(self, start: int, stop: int) -> bytes:
        if not self._twice or stop - start == self._num_bytes:  # the bucket compares a whole object
            return self._read(start, stop)
        where = f"{self._storage.url}/{self._name} bytes {start} to {stop}"
        return read_same_twice(lambda: self._read(start, stop), where)

    def _read(self, start: int, stop: int) -> bytes:
        where = f"{self._storage.url}/{self._name}"
        try:
            data = self._storage.read(self._name, start, stop, generation=self._generation)
        except (NotFound, PreconditionFailed) as error:
            raise ChangedInput(f"{where}: replaced or removed while it was read ({error}); start again") from error
        if len(data) != stop - start:
            raise ChangedInput(
                f"{where}: {len(data)} bytes at [{start}, {stop}), expected {stop - start}; it became shorter while "
                "it was read, start again"
            )
        return data
