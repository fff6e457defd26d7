"""A cache on a local disk of bytes read from a bucket, shared by the processes of a host.

Each shard has one sparse file: as many bytes as the shard, then a flag byte per sample that says
whether it is there. It counts with its full size from the start. Samples are compared with their
CRC32C like those from the bucket, so a damaged file is a miss. When the budget is used up, sets
that no process reads are removed, the least recently used first; after that, further shards stay
uncached: if shards of a set evicted each other, a pass over all of them would evict each one just
before it is needed again.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from shardset.errors import ConfigError
from shardset.format.manifest import Split
from shardset.read.indexes import ShardTable
from shardset.read.remote import RemoteReader
from shardset.storage.local import Descriptor
from shardset.storage.many import REQUESTS_AT_ONCE, Threads
from shardset.storage.open import local_folder

MAX_OPEN_FILES = 256
_LOCK = "lock"
_CREATE = os.O_RDWR | os.O_CREAT
_SET = re.compile("[0-9a-f]{32}")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCache:
    """A folder on a local disk that keeps what streams read from a bucket.

    All processes of a host and all later runs may share it. A Stream raises ConfigError if its set
    is on a local disk already, if the disk lacks the room, or if `num_bytes` is less than one
    shard.

    Args:
        folder: The path of the folder; it is made if it is missing.
        num_bytes: The most bytes that the folder may use.

    Raises:
        ConfigError: `folder` is an address, not a local path.

    Examples:
        >>> import shardset
        >>> cache = shardset.DiskCache(folder="cache", num_bytes=200_000_000)
        >>> stream = shardset.Stream(
        ...     "memory://bucket/shards", "train", batch_size=8, image_size=32, disk_cache=cache
        ... )
    """

    folder: str
    num_bytes: int

    def __post_init__(self) -> None:
        local_folder(self.folder, "the folder of a cache is")


class BlockCache:
    """The cached samples of one split.

    Raises ConfigError unless the budget fits the disk and holds a shard.
    """

    def __init__(self, spec: DiskCache, split: Split) -> None:
        self.spec, self.split = spec, split
        names = "\n".join(group.tars_sha256 for group in split.groups)
        digest = hashlib.sha256(names.encode("ascii")).hexdigest()[:32]
        self.folder = Path(spec.folder) / digest
        largest = split.max_tar_bytes + max(split.shard_sizes)
        if spec.num_bytes < largest:
            raise ConfigError(
                f"a cache of {spec.num_bytes} bytes holds not one shard of {largest} bytes; raise"
                " its num_bytes, or leave the cache out"
            )
        self._set_in_use = _claim(self.folder, spec.num_bytes)
        self.file_of = lru_cache(MAX_OPEN_FILES)(partial(_open, self.folder, spec.num_bytes, split))
        """The file of a shard; None if the budget has no room for it."""

    def __reduce__(self) -> tuple[type["BlockCache"], tuple[DiskCache, Split]]:
        return BlockCache, (self.spec, self.split)


class CachedReader:
    """Reads ranges from a cache; fetches the samples that it lacks from another reader, and caches
    them.
    """

    def __init__(self, reader: RemoteReader, table: ShardTable, cache: BlockCache) -> None:
        self.reader, self.table, self.cache = reader, table, cache
        self._uncached: set[int] = set()
        self._threads = Threads("shardset-cache", REQUESTS_AT_ONCE)

    def submit(self, shard: int, start: int, stop: int, *, fresh: bool = False) -> Future[bytes]:
        """Requests all bytes [start, stop) of a shard; `fresh` bypasses the cache."""
        return self._threads.call(partial(self._read, shard, start, stop, fresh))

    def close(self) -> None:
        self.reader.close()
        self._threads.close()

    def _read(self, shard: int, start: int, stop: int, fresh: bool) -> bytes:
        if shard not in self._uncached:
            try:
                if file := self.cache.file_of(shard):
                    return self._through(file, shard, start, stop, fresh)
            except OSError as error:
                folder = self.cache.folder
                _log.warning(
                    "%s: %s; shard %d is read from its storage from now on", folder, error, shard
                )
            self._uncached.add(shard)
        return self.reader.submit(shard, start, stop).result()

    def _through(self, file: "_CacheFile", shard: int, start: int, stop: int, fresh: bool) -> bytes:
        """The bytes [start, stop) from the cache, those that it lacks from the other reader."""
        index = self.table.index(shard)
        first, last = np.searchsorted(index.rows["start"], [start, stop]).tolist()
        missing = (first, last) if fresh else file.missing(first, last)
        if missing is None:
            data = file.read(start, stop)
            if len(data) == stop - start:
                return data
            missing = first, last  # the file was cut since its flags were read
        first, last = missing
        fetch_start, fetch_stop = index.byte_range(first, last)
        data = self.reader.submit(shard, fetch_start, fetch_stop).result()
        file.put(first, last, fetch_start, data)
        return file.read(start, fetch_start) + data + file.read(fetch_stop, stop)


class _CacheFile(Descriptor):
    """The sparse file of a shard: its bytes, then a flag per sample."""

    def __init__(self, path: Path, num_bytes: int, size: int) -> None:
        super().__init__(path, _CREATE)
        self.num_bytes = num_bytes
        os.ftruncate(self.fd, size)

    def missing(self, first: int, last: int) -> tuple[int, int] | None:
        """The range of samples to fetch so that all of [first, last) are cached; None if they
        are.
        """
        flags = os.pread(self.fd, last - first, self.num_bytes + first).ljust(last - first, b"\0")
        absent = flags.find(b"\0")
        return (first + absent, first + flags.rfind(b"\0") + 1) if absent >= 0 else None

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a shard; fewer if the file was cut."""
        return os.pread(self.fd, stop - start, start)

    def put(self, first: int, last: int, start: int, data: bytes) -> None:
        """Keeps the samples [first, last), whose bytes begin at `start`."""
        # The flags come last: whoever sees them may read the bytes. A full disk takes a part of
        # them, then no more.
        if os.pwrite(self.fd, data, start) == len(data):
            os.pwrite(self.fd, b"\1" * (last - first), self.num_bytes + first)


def _open(folder: Path, budget: int, split: Split, number: int) -> _CacheFile | None:
    """The file of a shard; None if the budget has no room for it."""
    shard = split.shards[number]
    path, size = folder / f"{number:06d}", shard.num_bytes + shard.num_samples
    with _locked(folder.parent / _LOCK):
        old_size = path.stat().st_size if path.exists() else 0
        has_room = old_size >= size or _make_room(folder.parent, budget, size - old_size)
        return _CacheFile(path, shard.num_bytes, size) if has_room else None


def _make_room(root: Path, budget: int, size: int) -> bool:
    used = size + sum(stat.st_size for stat in _stats(root))
    for folder in _sets(root):
        if used <= budget:
            break
        used -= _remove_unless_read(folder)
    return used <= budget


def _claim(folder: Path, budget: int) -> Descriptor:
    """Keeps other processes from removing the folder of a set while what this returns lives."""
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        # else another process might remove files that are being counted
        with _locked(root / _LOCK):
            cached = 512 * sum(stat.st_blocks for stat in _stats(root))
            free = shutil.disk_usage(root).free + cached
            if free >= budget:
                folder.mkdir(exist_ok=True)
                os.utime(folder)
                lock = Descriptor(folder / _LOCK, _CREATE)
                fcntl.flock(lock.fd, fcntl.LOCK_SH)
                return lock
    except OSError as error:
        raise ConfigError(
            f"{root}: can't be the folder of a cache ({error.strerror}); name another"
        ) from error
    raise ConfigError(
        f"{root}: {free} bytes are free for the cache, {budget} were asked for; lower its"
        " num_bytes, or free some"
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A block that one process at a time may enter.

    The lock ends with its process, however that ends.
    """
    file = Descriptor(path, _CREATE)
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX)
        yield
    finally:
        # closing is not enough: a child forked meanwhile holds the file too
        fcntl.flock(file.fd, fcntl.LOCK_UN)


def _sets(root: Path) -> list[Path]:
    """The folders of sets in `root`, the least recently used first; other files and folders there
    are not ours.
    """
    folders = [
        path
        for path in root.iterdir()
        if _SET.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(folders, key=lambda folder: folder.stat().st_mtime)


def _stats(root: Path) -> list[os.stat_result]:
    """The sizes of the cached shards of all sets in `root`."""
    files = (path for folder in _sets(root) for path in folder.iterdir())
    return [path.stat() for path in files if path.name != _LOCK]


def _remove_unless_read(folder: Path) -> int:
    """Removes a set unless a process reads it; returns the number of bytes removed."""
    lock = Descriptor(folder / _LOCK, _CREATE)
    try:
        fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    shutil.rmtree(folder)
    _log.info("%s: removed %d bytes that no process reads", folder, num_bytes)
    return num_bytes
