"""A folder on a local or mounted disk."""

import errno
import fcntl
import os
import stat as modes
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, Self

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError, TransientError
from shardset.storage.base import (
    ABSENT,
    Stat,
    Writer,
    accept_identical_object,
    check_name,
    check_prefix,
    check_range,
    join,
    os_errors_as_storage_errors,
    storage_error,
    utf8,
)

_TEMPORARY = ".shardset-tmp-"
_MAX_OPEN_FILES = 64
_PIECE = 1 << 20
_BUFFERED = 1 << 16
"""Smaller writes are buffered; larger ones go to the system without another copy."""


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """A folder on a local or mounted disk. `root` is absolute.

    Every regular file below it is an object, also through symbolic links; other kinds of files are not.
    With an `if_generation` other than ABSENT, the check happens right before the rename, not atomically with it.
    """

    root: str

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return self.root

    @property
    def is_remote(self) -> bool:
        """See Storage.is_remote."""
        return False

    @property
    def is_shared(self) -> bool:
        """See Storage.is_shared."""
        return True

    @property
    def reads_at_once(self) -> int:
        """See Storage.reads_at_once."""
        return 1

    def stat(self, name: str) -> Stat:
        """Size and generation; raises NotFound. `crc32c` is None."""
        path = self._path(name)
        return _local_stat(name, _regular(path))

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> bytes:
        """See Storage.read. File handles are kept, yet a replaced file is never read as the old one.

        With `generation`, a file that was renamed meanwhile may still be read under its old name.
        """
        path = self._path(name)
        file = _open_files().get(path, generation)
        if generation is not None:
            _check_generation(file.generation, generation, path)
        try:
            size = file.facts.st_size if generation else os.fstat(file.fd).st_size
            stop = check_range(start, stop, size, path)
            data = _pread(file.fd, start, stop)
            if generation is not None:  # shows a change since the file was opened
                facts = os.fstat(file.fd)
                _check_generation(_generation(facts if facts.st_nlink else _regular(path)), generation, path)
        except OSError as error:  # no `with` block: it would take as long as a small read
            _open_files().drop(path)  # on a network file system the handle may be stale
            raise storage_error(error, path) from error
        if len(data) < stop - start:
            raise TransientError(
                f"{path}: ended at byte {start + len(data)}, expected {stop}: it was cut while being read"
            )
        return data

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """See Storage.list. An unreadable folder or a dangling link raises StorageError."""
        folder = check_prefix(prefix, self.root).rpartition("/")[0]
        return self._walk(folder, prefix, ())

    def writer(self, name: str, *, if_generation: str | None = None) -> Writer:
        """See Storage.writer. When the block ends, the bytes and the folder's entry are on the disk."""
        return _LocalWriter(self._path(name), if_generation)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        """See Storage.delete. The generation is checked right before the removal, not atomically with it."""
        path = self._path(name)
        with os_errors_as_storage_errors(path), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if generation is None or generation == _generation(os.stat(path)):
                os.unlink(path)

    def sweep(self) -> None:
        """See Storage.sweep. Folders behind symbolic links are not entered."""
        for folder, _, names in os.walk(self.root):
            for name in names:
                if name.startswith(_TEMPORARY):
                    _remove_if_orphaned(os.path.join(folder, name))

    def on_retry(self, tell: Callable[[], None]) -> Self:
        """See Storage.on_retry: nothing is tried again."""
        return self

    def _path(self, name: str) -> str:
        path = f"{self.root.rstrip('/')}/{check_name(name, self.root)}"
        if _TEMPORARY in name and os.path.basename(path).startswith(_TEMPORARY):
            raise ConfigError(f"{path}: names that start with {_TEMPORARY} are kept for temporaries; choose another")
        return path

    def _walk(self, folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Stat]:
        path = os.path.join(self.root, folder)
        identity = _identity_of_folder(path, optional=not above and folder != "")
        if identity is None:
            return
        if identity in above:
            raise StorageError(f"{path}: a symbolic link leads back to a folder above it; remove the link")
        for entry in _sorted_entries(path):
            name = join(folder, entry.name)
            if entry.is_dir():
                if f"{name}/".startswith(prefix):
                    yield from self._walk(name, prefix, (*above, identity))
            elif name.startswith(prefix) and (facts := _facts(entry)) and modes.S_ISREG(facts.st_mode):
                yield _local_stat(name, facts)


def _identity_of_folder(path: str, *, optional: bool) -> tuple[int, int] | None:
    """Device and inode of a folder; None if there is none. A file there is an error unless `optional`."""
    with os_errors_as_storage_errors(path):
        try:
            facts = os.stat(path)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            if optional:
                return None
            raise
        if modes.S_ISDIR(facts.st_mode):
            return facts.st_dev, facts.st_ino
        if optional:
            return None
        raise NotADirectoryError(errno.ENOTDIR, path)


def _sorted_entries(path: str) -> list[os.DirEntry[str]]:
    """A folder's entries in the order of their full names' UTF-8 bytes; a folder's own name ends with `/` there."""
    with os_errors_as_storage_errors(path):
        try:
            with os.scandir(path) as scan:
                entries = [entry for entry in scan if not entry.name.startswith(_TEMPORARY)]
        except FileNotFoundError:  # removed since its parent was read
            return []
        return sorted(entries, key=lambda entry: utf8(f"{entry.name}/" if entry.is_dir() else entry.name))


def _facts(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What a directory entry leads to; None if it was removed meanwhile; raises StorageError for a dangling link."""
    with os_errors_as_storage_errors(entry.path):
        try:
            return entry.stat()
        except FileNotFoundError as error:
            if not os.path.islink(entry.path):
                return None
            raise StorageError(f"{entry.path}: a symbolic link to nothing; remove it or restore its target") from error


def _regular(path: str) -> os.stat_result:
    """The facts of a regular file; raises NotFound if there is none under that path."""
    with os_errors_as_storage_errors(path):
        try:
            facts = os.stat(path)
        except NotADirectoryError as error:
            raise NotFound(f"{path}: nothing is stored there: a part of the path is a file") from error
    return _check_regular(facts, path)


def _check_regular(facts: os.stat_result, path: str) -> os.stat_result:
    if not modes.S_ISREG(facts.st_mode):
        raise NotFound(f"{path}: expected a file, found a folder or a device; check the name")
    return facts


def _generation(facts: os.stat_result) -> str:
    return f"{facts.st_mtime_ns}-{facts.st_size}-{facts.st_ino}"


def _local_stat(name: str, facts: os.stat_result) -> Stat:
    return Stat(name=name, num_bytes=facts.st_size, generation=_generation(facts), crc32c=None)


def _check_generation(current: str, wanted: str, path: str) -> None:
    if current != wanted:
        raise PreconditionFailed(
            f"{path}: was replaced or changed (generation {current}, expected {wanted}); start again from it"
        )


def _pread(fd: int, start: int, stop: int) -> bytes:
    """The bytes [start, stop), fewer where the file ends before."""
    data = os.pread(fd, stop - start, start)
    while len(data) < stop - start:  # the system reads at most 2 GiB at once
        more = os.pread(fd, stop - start - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


class _OpenFile:
    """A regular file, and its facts when it was opened.

    The descriptor closes with the last reference, so the cache may drop a file that is in use.
    """

    __slots__ = ("facts", "fd", "generation")

    def __init__(self, path: str) -> None:
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer; regular files ignore it.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            _regular(path)
            raise storage_error(error, path) from error
        self.facts = _check_regular(os.fstat(self.fd), path)
        self.generation = _generation(self.facts)

    def __del__(self) -> None:
        try:
            os.close(self.fd)
        except AttributeError:  # it was never opened
            return


class _OpenFiles:
    """The most recently read files of this process, kept open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()

    def get(self, path: str, generation: str | None) -> _OpenFile:
        """The file at `path`: the kept one if it has that generation or is still the file at `path`, else a new one."""
        with self._lock:
            file = self._files.get(path)
            if file is not None and (
                file.generation == generation if generation else _same_file(file.facts, _regular(path))
            ):
                self._files.move_to_end(path)
                return file
            file = self._files[path] = _OpenFile(path)
            self._files.move_to_end(path)
            if len(self._files) > _MAX_OPEN_FILES:
                self._files.popitem(last=False)
        return file

    def drop(self, path: str) -> None:
        """Forgets a file, so that the next read opens it again."""
        with self._lock:
            self._files.pop(path, None)


def _same_file(facts: os.stat_result, others: os.stat_result) -> bool:
    return (facts.st_dev, facts.st_ino) == (others.st_dev, others.st_ino)


_files_of_process: dict[int, _OpenFiles] = {}


def _open_files() -> _OpenFiles:
    # One for each process: a lock that another thread held during a fork stays locked in the child.
    return _files_of_process.get(os.getpid()) or _files_of_process.setdefault(os.getpid(), _OpenFiles())


class _LocalWriter:
    """Writes a temporary in the same folder, and renames it to the object at the end of the block."""

    def __init__(self, path: str, if_generation: str | None) -> None:
        self._path = path
        self._if_generation = if_generation
        self._folder = os.path.dirname(path)
        self._temporary = os.path.join(self._folder, _TEMPORARY + uuid.uuid4().hex)
        self._num_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Writer:
        with os_errors_as_storage_errors(self._path):
            _make_folders(self._folder)
            _refuse_device(self._path)
            self._file = _create_locked(self._temporary)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes."""
        assert self._file is not None, "write() outside the with block"
        self._num_bytes += len(data)
        with os_errors_as_storage_errors(self._path):
            self._file.write(data)

    def __exit__(self, *exc: object) -> None:
        assert self._file is not None
        try:
            if exc[0] is None:
                with os_errors_as_storage_errors(self._path):
                    self._commit(self._file)
        finally:
            with suppress(OSError):  # of the unwritten rest on a full disk: the first error counts
                self._file.close()
            with suppress(FileNotFoundError):
                os.unlink(self._temporary)

    def _commit(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        self._publish()
        _sync_folder(self._folder)

    def _publish(self) -> None:
        if self._if_generation is None or self._generation() == self._if_generation != ABSENT:
            os.replace(self._temporary, self._path)
            return
        if self._if_generation == ABSENT:
            with suppress(FileExistsError):
                _link(self._temporary, self._path)
                return
        accept_identical_object(self._stored(), self._num_bytes, _crc32c_of(self._temporary), self._path)

    def _generation(self) -> str:
        try:
            return _generation(os.stat(self._path))
        except FileNotFoundError:
            return ABSENT

    def _stored(self) -> Stat | None:
        if os.path.isdir(self._path):
            raise IsADirectoryError(errno.EISDIR, self._path)
        try:
            facts = _regular(self._path)
        except NotFound:
            return None
        crc = _crc32c_of(self._path) if facts.st_size == self._num_bytes else None
        return Stat(name=self._path, num_bytes=facts.st_size, generation=_generation(facts), crc32c=crc)


def _refuse_device(path: str) -> None:
    """Raises StorageError where a rename would replace a device such as /dev/null, or the target of /dev/stdout."""
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if not (modes.S_ISREG(mode) or modes.S_ISDIR(mode)):
            raise StorageError(f"{path}: a device, pipe or socket stands there, expected a file; choose another name")


def _link(path: str, name: str) -> None:
    """A second name for a file; EOPNOTSUPP on file systems without hard links, such as FAT or a mounted bucket."""
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):  # not a lack of permission: the folder takes files
            raise OSError(errno.EOPNOTSUPP, "no hard links", name) from error
        raise


def _create_locked(path: str) -> BinaryIO:
    """A new file with a lock that lasts while it is open: `sweep` sees that its writer lives."""
    while True:
        file = open(path, "xb", buffering=_BUFFERED)  # noqa: SIM115
        with suppress(OSError):  # without locks on this file system, no sweep can take one either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # swept between the two calls above


def _remove_if_orphaned(path: str) -> None:
    # Another build may sweep at the same time; another user's files are not ours to judge.
    with os_errors_as_storage_errors(path), suppress(FileNotFoundError, PermissionError), open(path, "r+b") as file:
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
        if error.errno != errno.EINVAL:  # some network file systems have nothing to sync in a folder
            raise
    finally:
        os.close(fd)
