"""Regular files of a local disk: their facts, and the handles that stay open between reads."""

import os
import stat as modes
import threading
from collections import OrderedDict

from shardset.errors import NotFound
from shardset.storage.base import os_errors_as_storage_errors, storage_error

_MAX_OPEN_FILES = 64


def generation_of(facts: os.stat_result) -> str:
    """The generation of a file: it changes with its time, its size or its inode."""
    return f"{facts.st_mtime_ns}-{facts.st_size}-{facts.st_ino}"


def stat_regular(path: str) -> os.stat_result:
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


class OpenFile:
    """A regular file, and its facts when it was opened.

    The descriptor closes with the last reference, so the cache may drop a file that is in use.
    """

    __slots__ = ("facts", "fd", "generation")

    def __init__(self, path: str) -> None:
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer; regular files ignore it.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            stat_regular(path)
            raise storage_error(error, path) from error
        self.facts = _check_regular(os.fstat(self.fd), path)
        self.generation = generation_of(self.facts)

    def __del__(self) -> None:
        try:
            os.close(self.fd)
        except AttributeError:  # it was never opened
            return

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop), fewer where the file ends before."""
        data = os.pread(self.fd, stop - start, start)
        while len(data) < stop - start:  # the system reads at most 2 GiB at once
            more = os.pread(self.fd, stop - start - len(data), start + len(data))
            if not more:
                break
            data += more
        return data


class OpenFiles:
    """The most recently read files of this process, kept open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, OpenFile] = OrderedDict()

    def get(self, path: str, generation: str | None) -> OpenFile:
        """The kept file if it has that generation, or is still the one at `path`; else a newly opened one."""
        with self._lock:
            file = self._files.get(path)
            if file is None or not (
                file.generation == generation if generation else os.path.samestat(file.facts, stat_regular(path))
            ):
                file = self._files[path] = OpenFile(path)
                if len(self._files) > _MAX_OPEN_FILES:
                    self._files.popitem(last=False)
            self._files.move_to_end(path)
        return file

    def drop(self, path: str) -> None:
        """Forgets a file, so that the next read opens it again."""
        with self._lock:
            self._files.pop(path, None)


_files_of_process: dict[int, OpenFiles] = {}


def open_files() -> OpenFiles:
    """The open files of this process."""
    # One for each process: a lock that another thread held during a fork stays locked in the child.
    return _files_of_process.get(os.getpid()) or _files_of_process.setdefault(os.getpid(), OpenFiles())
