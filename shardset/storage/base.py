"""The Storage protocol, and what every implementation shares: names, ranges,
errors in plain words.
"""

import errno
from collections.abc import Callable, Iterator
from typing import Protocol, Self

import msgspec

from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError
from shardset.prepared import prepared

ABSENT = "0"
"""The generation of what does not exist: `writer(name, if_generation=ABSENT)` never replaces
anything.
"""

CLIMBING = frozenset(("", ".", ".."))
"""No part of a name is one of these: they would lead out of the folder."""

_NO_LINKS = (
    "the file system has no hard links, which create-only-if-absent needs; choose another"
    " folder, or the gs:// address of a bucket that is mounted there"
)
_ADVICE = {
    errno.EACCES: (
        "no permission; run as a user who may, or change the mode of the file and of the folders"
        " above it"
    ),
    errno.EPERM: (
        "the system does not permit it; check owner and attributes (lsattr); if the file system has"
        " no hard links, which create-only-if-absent needs, choose another folder"
    ),
    errno.ENOSPC: "the disk is full; free some space or choose another folder, then run again",
    errno.EDQUOT: (
        "the disk quota is used up; free some space or choose another folder, then run again"
    ),
    errno.EFBIG: (
        "the file is larger than the system allows here (ulimit -f); raise the limit or use smaller"
        " shards"
    ),
    errno.EROFS: "the file system is mounted read-only; choose another folder",
    errno.ENOTDIR: "a part of the path is a file, expected folders; choose another path",
    errno.EEXIST: "a part of the path is a file, expected folders; choose another path",
    errno.EISDIR: "this is a folder, expected a file; choose another name",
    errno.ELOOP: "the symbolic links run in a circle; remove one of them",
    errno.ENAMETOOLONG: "the name is too long for this file system; choose a shorter one",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.ENOSYS: _NO_LINKS,
    errno.EOPNOTSUPP: _NO_LINKS,
}


@prepared
class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a stored object that need no read of it.

    Attributes:
        name: Relative to the folder.
        num_bytes: The size.
        generation: Changes whenever the content is replaced.
        crc32c: In base64 as Google Cloud Storage reports it; None on a local disk, which keeps
            none.
    """

    name: str
    num_bytes: int
    generation: str
    crc32c: str | None


class ObjectWriter(Protocol):
    """Writes one object, which appears when the `with` block ends.

    An exception in the block aborts: no object appears and no temporary file stays.
    """

    def __enter__(self) -> "ObjectWriter": ...
    def __exit__(self, *exc: object) -> None: ...
    def write(self, data: bytes | memoryview) -> None: ...


class Storage(Protocol):
    """A folder of objects, on a disk, in a bucket or in memory; `open_storage` makes one.

    Names are relative, use `/`, and can't leave the folder (ConfigError). Instances pickle, because
    clients and file handles are opened on first use. Threads may share an instance.
    """

    @property
    def url(self) -> str:
        """The folder as a user types it, without a trailing slash.

        It is an absolute path unless `is_remote`.
        """

    @property
    def is_remote(self) -> bool:
        """Whether the objects are not files of this machine.

        Then they have no path, no lock and nothing to sync.
        """

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the same objects."""

    @property
    def reads_at_once(self) -> int:
        """How many concurrent reads pay off: 1 where a read does not wait for a network."""

    @property
    def is_throttled(self) -> bool:
        """Whether reads were refused within a minute because there were too many.

        Then it is no time to add any.
        """
        return False

    def stat(self, name: str) -> Stat:
        """The facts about an object.

        Args:
            name: The name of the object.

        Returns:
            `name`, `num_bytes`, `generation` and `crc32c` (base64; None on a local disk).

        Raises:
            NotFound: There is no such object.
        """

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        """All the bytes [start, stop) of an object.

        Args:
            name: The name of the object.
            start: The first byte.
            stop: The byte after the last one; None for the end of the object.
            generation: The generation that must be stored; None for any.

        Raises:
            NotFound: There is no such object, or that generation of it is gone.
            PreconditionFailed: Another generation is stored.
            StorageError: The range ends after the object.
            TransientError: Some bytes are still missing after retries.
        """

    def read_with_stat(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[bytes, Stat]:
        """The bytes of an object, and the facts about the object that they are of.

        It is one request if the storage sends both.

        Args:
            name: The name of the object.
            start: The first byte.
            stop: The byte after the last one; None for the end of the object.

        Raises:
            StorageError: As for `read`.
        """
        stat = self.stat(name)
        return self.read(name, start, stop, generation=stat.generation), stat

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """The objects of the folder, recursively, in the order of their UTF-8 names.

        It lists nothing for a folder that does not exist, and no temporary files.

        Args:
            prefix: How the names begin.

        Yields:
            The facts about each object, as `stat` gives them.
        """

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        """Creates or replaces an object atomically: it appears when the `with` block ends.

        Args:
            name: The name of the object.
            if_generation: Writes only if this generation is stored at the end of the block; "0" if
                there must be no object. None replaces whatever there is.

        Returns:
            A context manager with `write(data)`. An exception in its block leaves no object.

        Raises:
            PreconditionFailed: Another generation is stored, unless it has the same size and
                CRC32C: then a retry or another worker wrote the same bytes, which is success.
        """

    def write(self, name: str, data: bytes, *, if_generation: str | None = None) -> None:
        """A `writer` that gets all bytes at once.

        Args:
            name: The name of the object.
            data: Its content.
            if_generation: As for `writer`.

        Raises:
            PreconditionFailed: As for `writer`.
        """
        with self.writer(name, if_generation=if_generation) as out:
            out.write(data)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        """Deletes an object; does nothing if there is none.

        Args:
            name: The name of the object.
            generation: Deletes only this generation; None for any.
        """

    def sweep(self) -> None:
        """Deletes the temporary files of killed writers; keeps the files of living ones.

        There are none in a bucket.
        """
        return

    def on_retry(self, tell: Callable[[], None]) -> Self:
        """The same folder, whose requests tell when they are tried again.

        Args:
            tell: Is called before each pause between retries.
        """
        return self


def check_name(name: str, where: str) -> str:
    """Returns `name` if it is relative and stays inside its folder;
    raises ConfigError otherwise.
    """
    if not CLIMBING.isdisjoint(name.split("/")) or "\0" in name:
        raise ConfigError(
            f"{where}: {name!r} is absolute, empty or climbs; expected a name such as train/a.tar"
        )
    return name


def check_prefix(prefix: str, where: str) -> str:
    """Returns `prefix` if it can begin a name; raises ConfigError otherwise."""
    if "/" in prefix or "\0" in prefix:
        check_name(prefix.rpartition("/")[0], where)
    return prefix


def join(folder: str, name: str) -> str:
    """`name` in `folder`; the empty folder is the root."""
    return f"{folder}/{name}" if folder else name


def utf8(name: str) -> bytes:
    """The sort key of a listing: Cloud Storage orders names by their UTF-8 bytes."""
    return name.encode("utf-8", "surrogateescape")


def stat_or_none(storage: Storage, name: str) -> Stat | None:
    """The object of that name; None if there is none."""
    try:
        return storage.stat(name)
    except NotFound:
        return None


def try_to_delete(
    storage: Storage, name: str, *, generation: str | None = None
) -> StorageError | None:
    """Deletes an object that nothing needs any more, as `delete` does; returns the error if that
    failed, which is no failure of the work.
    """
    try:
        storage.delete(name, generation=generation)
    except StorageError as error:
        return error
    return None


def check_generation(current: str, wanted: str | None, where: str) -> None:
    """Raises PreconditionFailed unless `wanted` is None or the current generation."""
    if wanted is not None and current != wanted:
        raise PreconditionFailed(
            f"{where}: was replaced or changed (generation {current}, expected {wanted}); start"
            " again from it"
        )


def accept_identical_object(stored: Stat | None, num_bytes: int, crc32c: str, where: str) -> None:
    """Returns if the stored object equals what was to be written; raises PreconditionFailed
    otherwise.
    """
    if stored is None:
        raise PreconditionFailed(
            f"{where}: it no longer exists, expected the generation that was to be replaced"
        )
    if (stored.num_bytes, stored.crc32c) != (num_bytes, crc32c):
        raise PreconditionFailed(
            f"{where}: a different object exists: {stored.num_bytes} bytes, crc32c {stored.crc32c};"
            f" expected nothing, or {num_bytes} bytes, {crc32c}; remove it or choose another place"
        )


def check_range(start: int, stop: int | None, num_bytes: int, where: str) -> int:
    """The end of the range [start, stop); raises StorageError if an object of `num_bytes` does not
    hold it.
    """
    end = num_bytes if stop is None else stop
    if not 0 <= start <= end <= num_bytes:
        raise StorageError(
            f"{where}: bytes {start} to {end} were asked for but it holds {num_bytes}; is it"
            " another file?"
        )
    return end


class os_errors_as_storage_errors:  # noqa: N801
    """Turns an OSError of its block into a NotFound or StorageError that says where, what and what
    to do.

    A class, because entering a `contextlib` block costs more than the small read or write inside.
    """

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):
            raise storage_error(error, self._where) from error


def storage_error(error: OSError, where: str) -> StorageError:
    """An OSError as a StorageError that says where, what and what to do."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{where}: nothing is stored there; check the name")
    advice = _ADVICE.get(
        error.errno or 0, f"the system said: {error.strerror or error}; check the disk"
    )
    return StorageError(f"{where}: {advice}")
