"""The common part of storages of remote folders: names, reads, and a writer that holds a complete
object.
"""

import math
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import ConfigError, StorageError
from shardset.storage.base import (
    ObjectWriter,
    Stat,
    Storage,
    check_name,
    check_prefix,
    join,
    os_errors_as_storage_errors,
)
from shardset.storage.many import OBJECTS_AT_ONCE
from shardset.storage.retry import RetryPolicy, policy_of_process


@dataclass(frozen=True, slots=True)
class RemoteFolder(Storage):
    """Objects of a bucket below a prefix; a class for each `scheme` of addresses."""

    bucket: str
    prefix: str = ""
    retry: RetryPolicy = field(default_factory=policy_of_process)

    scheme: ClassVar[str]
    is_remote: ClassVar[bool] = True
    is_shared: ClassVar[bool] = True
    reads_at_once: ClassVar[int] = OBJECTS_AT_ONCE

    def __post_init__(self) -> None:
        if self.prefix:
            check_name(self.prefix, f"{self.scheme}://{self.bucket}")

    @property
    def url(self) -> str:
        """`scheme://bucket/prefix`."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def stat(self, name: str) -> Stat:
        return self._read(name, 0, 0, None)[1]

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        return self._read(name, start, stop, generation)[0]

    def read_with_stat(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[bytes, Stat]:
        return self._read(name, start, stop, None)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        return self._list(
            join(self.prefix, check_prefix(prefix, self.url)), len(join(self.prefix, ""))
        )

    def on_retry(self, tell: Callable[[], None]) -> Self:
        return replace(self, retry=replace(self.retry, on_pause=tell))

    def _full(self, name: str) -> str:
        """The name of an object in its bucket; raises ConfigError for one that can't be there."""
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{self.url}: {name!r} is not UTF-8, as names here are; rename it"
            ) from None
        return join(self.prefix, check_name(name, self.url))

    @abstractmethod
    def _read(
        self, name: str, start: int, stop: int | None, generation: str | None
    ) -> tuple[bytes, Stat]:
        """The bytes [start, stop) and the facts, as `read` and `read_with_stat` promise."""

    @abstractmethod
    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        """Objects of the bucket whose names start with `wanted`, each without its first `skip`
        characters.
        """


class SpooledWriter:
    """Collects the bytes of an object and their CRC32C, and gives itself to `commit` at the end of
    the block; StorageError above `max_bytes`.

    Keeps up to `max_memory` bytes in memory (0: all), more in a temporary file.
    """

    def __init__(
        self,
        commit: Callable[["SpooledWriter"], None],
        where: str,
        max_memory: int = 0,
        max_bytes: float = math.inf,
    ) -> None:
        self.commit, self.where = commit, where
        self.max_memory, self.max_bytes = max_memory, max_bytes
        self.num_bytes = self._crc = 0
        self._errors = os_errors_as_storage_errors(f"{where}, in the temporary folder (TMPDIR)")

    @property
    def crc32c(self) -> str:
        """The CRC32C of what was written, as text."""
        return crc32c_text(self._crc)

    def data(self) -> bytes:
        """All that was written."""
        self.file.seek(0)
        return self.file.read()

    def __enter__(self) -> ObjectWriter:
        self.file = tempfile.SpooledTemporaryFile(max_size=self.max_memory)
        return self

    def write(self, data: bytes | memoryview) -> None:
        self.num_bytes += len(data)
        self._crc = extend_crc32c(self._crc, data)
        if self.num_bytes > self.max_bytes:
            raise StorageError(
                f"{self.where}: more than the {self.max_bytes} bytes that one request can carry"
            )
        with self._errors:
            self.file.write(data)

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                with self._errors:
                    self.file.flush()
                self.commit(self)
        finally:
            # on a full disk, closing complains about bytes that nobody wants any more
            with suppress(OSError):
                self.file.close()
