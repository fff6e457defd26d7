"""The compile cache of torch_xla: compiled graphs as files in a local folder and, on request, in a bucket.

A run does not depend on it. Where it can't be used, the run logs a warning and compiles.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

from shardset.errors import ConfigError, NotFound, ShardsetError, StorageError
from shardset.storage.base import Storage, os_errors_as_storage_errors
from shardset.storage.open import is_address, open_storage

VARIABLE = "XLA_PERSISTENT_CACHE_PATH"
"""Environment variable that names the folder to torch_xla, which reads it once, when it first compiles."""
COPY_EVERY_S = 30.0
CLOSE_S = 60.0
"""How long the end of a run waits for the last copies."""

FETCHED_NS = 0
"""The time of change that a fetched file gets, whoever fetches it."""

FileState = tuple[int, int]
"""Size and time of change of a file."""
FileStates = dict[str, FileState]
"""Those of files by name."""


@contextmanager
def opened(address: str | None, process: int) -> Iterator[None]:
    """While the block runs, torch_xla keeps compiled graphs at `address`, by default in the cache folder of the user.

    Raises ConfigError if the address names no storage or no bucket.
    """
    with ExitStack() as exits:
        try:
            local = local_folder(address, process)
            _check_writable(local)
            os.environ[VARIABLE] = str(local)
            if address is not None and is_address(address):
                exits.enter_context(CacheCopy(local, open_storage(f"{address.rstrip('/')}/{local.name}")))
        except StorageError as error:
            _warn(error)
        yield


def local_folder(address: str | None, process: int) -> Path:
    """The folder of one process, because torch_xla does not write files atomically. Raises ConfigError, StorageError.

    It is below a local address. Otherwise it is in the cache folder of the user, and each bucket has its own.
    """
    own = f"process-{process:03d}"
    if address is not None and not is_address(address):
        return Path(open_storage(address).url) / own
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(home):
        raise StorageError(f"{home}: expected an absolute path; set HOME or XDG_CACHE_HOME")
    return Path(home, "shardset", "xla", *([quote(address, safe="")] if address else []), own)


def settled(before: FileStates, now: FileStates) -> FileStates:
    """The files that have not changed in between, so that torch_xla has written them whole."""
    return {name: state for name, state in now.items() if before.get(name) == state}


class CacheCopy:
    """Fetches what a bucket has and the local folder lacks; copies new files back every 30 seconds and at the end."""

    def __init__(self, local: Path, storage: Storage) -> None:
        self._local, self._storage = local, storage
        self._stored: FileStates = {}
        self._has_warned = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compile cache", daemon=True)

    def __enter__(self) -> "CacheCopy":
        with self._warnings():
            self._fetch()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _warn(f"{self._storage.url}: the last copies took longer than {CLOSE_S:.0f} s")

    def _fetch(self) -> None:
        try:
            stored = [stat for stat in self._storage.list() if _is_entry(stat.name)]
        except NotFound as error:
            raise ConfigError(f"compile_cache: {error}") from error
        local = self._files()
        for stat in stored:
            state = local.get(stat.name)
            if state is None or state[0] != stat.num_bytes:
                state = self._write(stat.name, self._storage.read(stat.name))
            self._stored[stat.name] = state

    def _write(self, name: str, data: bytes) -> FileState:
        # Another run may be reading the folder, and another replica of this process be fetching too: what either of
        # them leaves is the same to both.
        temporary = self._local / f".{name}.{threading.get_native_id()}"
        with os_errors_as_storage_errors(str(temporary)):
            temporary.write_bytes(data)
            os.utime(temporary, ns=(FETCHED_NS, FETCHED_NS))
            temporary.replace(self._local / name)
        return len(data), FETCHED_NS

    def _run(self) -> None:
        before: FileStates = {}
        while not self._closing.wait(COPY_EVERY_S):
            with self._warnings():
                now = self._files()
                self._send(settled(before, now))
                before = now
        with self._warnings():
            self._send(self._files())  # the run has ended: nothing is being written

    def _send(self, files: FileStates) -> None:
        for name, state in files.items():
            if self._stored.get(name) != state:
                with os_errors_as_storage_errors(str(self._local / name)):
                    data = (self._local / name).read_bytes()
                with self._storage.writer(name) as writer:
                    writer.write(data)
                self._stored[name] = state

    def _files(self) -> FileStates:
        with os_errors_as_storage_errors(str(self._local)):
            stats = {path.name: path.stat() for path in self._local.iterdir() if _is_entry(path.name)}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        """Turns the first failure into a warning and ignores the others. A wrong configuration stays an error."""
        try:
            yield
        except ConfigError:
            raise
        except ShardsetError as error:
            if not self._has_warned:
                _warn(error)
            self._has_warned = True


def _is_entry(name: str) -> bool:
    return not name.startswith(".") and "/" not in name


def _check_writable(folder: Path) -> None:
    with os_errors_as_storage_errors(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _warn(problem: object) -> None:
    print(f"warning: compile cache: {problem}; the run goes on without it", file=sys.stderr, flush=True)
