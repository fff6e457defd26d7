"""A folder on a local or mounted disk."""

import errno
import fcntl
import os
import stat as modes
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, ClassVar

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import ConfigError, NotFound, StorageError, TransientError
from shardset.storage.base import (
    ABSENT,
    ObjectWriter,
    Stat,
    Storage,
    accept_identical_object,
    check_generation,
    check_name,
    check_prefix,
    check_range,
    join,
    os_errors_as_storage_errors,
    storage_error,
    utf8,
)

_TEMPORARY = ".shardset-tmp-"
_NEW_BYTES = 32 << 20
_PIECE = 1 << 20
_MAX_OPEN_FILES = 64
# smaller writes are buffered; larger ones go to the system without another copy
_BUFFERED = 1 << 16


@dataclass(frozen=True, slots=True)
class LocalStorage(Storage):
    """A folder on a local or mounted disk. `root` is absolute.

    Every regular file below it is an object, also through symbolic links; other kinds of files are
    not. An `if_generation` other than ABSENT is checked right before the rename, not atomically
    with it.
    """

    root: str

    is_remote: ClassVar[bool] = False
    is_shared: ClassVar[bool] = True
    reads_at_once: ClassVar[int] = 1

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return self.root

    def stat(self, name: str) -> Stat:
        """`crc32c` is None."""
        return _local_stat(name, stat_regular(self._path(name)))

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        """Keeps files that are read by generation open, yet never reads a replaced file as the old
        one.

        A file that was renamed meanwhile may still be read under its old name.
        """
        path = self._path(name)
        file = OpenFile(path) if generation is None else _opened(path, generation)
        stop = check_range(start, stop, file.facts.st_size, path)
        try:
            data = file.read(start, stop)
            if generation is not None:  # shows a change since the file was opened
                facts = os.fstat(file.fd)
                check_generation(
                    generation_of(facts if facts.st_nlink else stat_regular(path)), generation, path
                )
        except OSError as error:  # no `with` block: it would take as long as a small read
            _opened.cache_clear()  # on a network file system the handle may be stale
            raise storage_error(error, path) from error
        if len(data) < stop - start:
            raise TransientError(
                f"{path}: ended at byte {start + len(data)}, expected {stop}: it was cut while"
                " being read"
            )
        return data

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Raises StorageError for an unreadable folder or a dangling link."""
        folder = check_prefix(prefix, self.root).rpartition("/")[0]
        return self._walk(folder, prefix)

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        """When the block has ended, the bytes and the folder's entry are on the disk."""
        return _LocalWriter(self._path(name), if_generation)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        """The generation is checked right before the removal, not atomically with it."""
        path = self._path(name)
        with (
            os_errors_as_storage_errors(path),
            suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
        ):
            if generation is None or generation == generation_of(os.stat(path)):
                os.unlink(path)

    def sweep(self) -> None:
        """Does not enter folders behind symbolic links."""
        for folder, _, names in os.walk(self.root):
            for name in names:
                if name.startswith(_TEMPORARY):
                    _remove_if_orphaned(os.path.join(folder, name))

    def _path(self, name: str) -> str:
        path = f"{self.root.rstrip('/')}/{check_name(name, self.root)}"
        if _TEMPORARY in name and os.path.basename(path).startswith(_TEMPORARY):
            raise ConfigError(
                f"{path}: names that start with {_TEMPORARY} are kept for temporaries; choose"
                " another"
            )
        return path

    def _walk(self, folder: str, prefix: str) -> Iterator[Stat]:
        path = os.path.join(self.root, folder)
        for entry in _sorted_entries(path, is_optional=folder != ""):
            name = join(folder, entry.name)
            if entry.is_dir():
                if f"{name}/".startswith(prefix):
                    yield from self._walk(name, prefix)
            elif (
                name.startswith(prefix)
                and (facts := _facts(entry))
                and modes.S_ISREG(facts.st_mode)
            ):
                yield _local_stat(name, facts)


def _sorted_entries(path: str, *, is_optional: bool) -> list[os.DirEntry[str]]:
    """A folder's entries in the order of their full names' UTF-8 bytes; a folder's own name ends
    with `/` there.

    Empty if the folder does not exist. A file in its place is an error unless `is_optional`.
    """
    with os_errors_as_storage_errors(path):
        try:
            with os.scandir(path) as scan:
                entries = [entry for entry in scan if not entry.name.startswith(_TEMPORARY)]
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            if is_optional:
                return []
            raise
        return sorted(
            entries, key=lambda entry: utf8(f"{entry.name}/" if entry.is_dir() else entry.name)
        )


def _facts(entry: os.DirEntry[str]) -> os.stat_result | None:
    """The target of a directory entry; None if it was removed meanwhile; raises StorageError for a
    dangling link.
    """
    with os_errors_as_storage_errors(entry.path):
        try:
            return entry.stat()
        except FileNotFoundError as error:
            if not os.path.islink(entry.path):
                return None
            raise StorageError(
                f"{entry.path}: a symbolic link to nothing; remove it or restore its target"
            ) from error


def generation_of(facts: os.stat_result) -> str:
    """The generation of a file: it changes with its time, its size or its inode."""
    return f"{facts.st_mtime_ns}-{facts.st_size}-{facts.st_ino}"


def stat_regular(path: str) -> os.stat_result:
    """The facts of a regular file; raises NotFound if there is none under that path."""
    with os_errors_as_storage_errors(path):
        try:
            facts = os.stat(path)
        except NotADirectoryError as error:
            raise NotFound(
                f"{path}: nothing is stored there: a part of the path is a file"
            ) from error
    return _check_regular(facts, path)


def _check_regular(facts: os.stat_result, path: str) -> os.stat_result:
    if not modes.S_ISREG(facts.st_mode):
        raise NotFound(f"{path}: expected a file, found a folder or a device; check the name")
    return facts


class Descriptor:
    """A file descriptor, closed with the last reference: what keeps it open may drop it while it is
    in use.
    """

    __slots__ = ("fd",)

    def __init__(self, path: str | os.PathLike[str], flags: int) -> None:
        self.fd = -1
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # An argument, because at the end of the program `os` may be gone before this.
        if self.fd >= 0:
            close(self.fd)


class OpenFile(Descriptor):
    """A regular file, and its facts when it was opened."""

    __slots__ = ("facts",)

    def __init__(self, path: str) -> None:
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer; regular files ignore it.
            super().__init__(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            stat_regular(path)
            raise storage_error(error, path) from error
        self.facts = _check_regular(os.fstat(self.fd), path)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop), fewer where the file ends before."""
        data = os.pread(self.fd, stop - start, start)
        while len(data) < stop - start:  # the system reads at most 2 GiB at once
            more = os.pread(self.fd, stop - start - len(data), start + len(data))
            if not more:
                break
            data += more
        return data


@lru_cache(_MAX_OPEN_FILES)
def _opened(path: str, generation: str) -> OpenFile:
    """The file at `path`, kept open; raises PreconditionFailed if it has another generation."""
    file = OpenFile(path)
    check_generation(generation_of(file.facts), generation, path)
    return file


def _local_stat(name: str, facts: os.stat_result, crc32c: str | None = None) -> Stat:
    return Stat(name=name, num_bytes=facts.st_size, generation=generation_of(facts), crc32c=crc32c)


class _LocalWriter:
    """Writes a temporary file in the same folder, and renames it to the object at the end of the
    block.
    """

    _file: BinaryIO

    def __init__(self, path: str, if_generation: str | None) -> None:
        self._path = path
        self._if_generation = if_generation
        self._folder = os.path.dirname(path)
        self._temporary = os.path.join(self._folder, _TEMPORARY + uuid.uuid4().hex)
        self._num_begun = self._num_new = 0

    def __enter__(self) -> ObjectWriter:
        with os_errors_as_storage_errors(self._path):
            _make_folders(self._folder)
            _refuse_other_kinds(self._path)
            self._file = _create_locked(self._temporary)
        return self

    def write(self, data: bytes | memoryview) -> None:
        with os_errors_as_storage_errors(self._path):
            self._file.write(data)
            self._num_new += len(data)
            if self._num_new >= _NEW_BYTES:
                self._begin_to_store()

    def _begin_to_store(self) -> None:
        """Has the disk begin with the new bytes, so that the sync at the end waits for few of them.

        Linux starts to store what it is told to drop, and does not wait for that.
        """
        dropped = os.POSIX_FADV_DONTNEED
        os.posix_fadvise(self._file.fileno(), self._num_begun, self._num_new, dropped)
        self._num_begun, self._num_new = self._num_begun + self._num_new, 0

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                with os_errors_as_storage_errors(self._path):
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    self._publish()
                    _sync_folder(self._folder)
        finally:
            with suppress(OSError):  # on a full disk, closing fails again; the first error counts
                self._file.close()
            with suppress(FileNotFoundError):
                os.unlink(self._temporary)

    def _publish(self) -> None:
        facts = _stat_or_none(self._path)
        generation = generation_of(facts) if facts else ABSENT
        if self._if_generation is None or generation == self._if_generation != ABSENT:
            os.replace(self._temporary, self._path)
            return
        if generation == self._if_generation:
            with suppress(FileExistsError):
                os.link(self._temporary, self._path)
                return
            facts = _stat_or_none(self._path)
        num_bytes = os.path.getsize(self._temporary)
        crc32c = _crc32c_of(self._path) if facts and facts.st_size == num_bytes else None
        stored = _local_stat(self._path, facts, crc32c) if facts else None
        accept_identical_object(stored, num_bytes, _crc32c_of(self._temporary), self._path)


def _stat_or_none(path: str) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return os.stat(path)
    return None


def _refuse_other_kinds(path: str) -> None:
    """Raises StorageError where a rename would replace a folder, a device or the target of
    /dev/stdout.
    """
    facts = _stat_or_none(path)
    if facts and modes.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, path)
    if facts and not modes.S_ISREG(facts.st_mode):
        raise StorageError(
            f"{path}: this is a device, pipe or socket, expected a file; choose another name"
        )


def _create_locked(path: str) -> BinaryIO:
    """A new file, locked while it is open, so that `sweep` sees that its writer lives."""
    while True:
        file = open(path, "xb", buffering=_BUFFERED)  # noqa: SIM115
        with suppress(OSError):  # without locks on this file system, no sweep can take one either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # swept between the two calls above


def _remove_if_orphaned(path: str) -> None:
    # FileNotFoundError: another build sweeps at the same time. PermissionError: the file is another
    # user's.
    with (
        os_errors_as_storage_errors(path),
        suppress(FileNotFoundError, PermissionError),
        open(path, "r+b") as file,
    ):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its writer lives, or this file system has no locks
            return
        os.unlink(path)


def _crc32c_of(path: str) -> str:
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            crc = extend_crc32c(crc, piece)
    return crc32c_text(crc)


def _make_folders(folder: str) -> None:
    """Creates a folder and its parents, and syncs each entry before the next."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_folders(above)
    with suppress(FileExistsError):
        os.mkdir(folder)
        _sync_folder(above)
    if not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, folder)


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # some network file systems have nothing to sync in a folder
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
