"""The shard set of a run, parsed once a process: defaults, training, evaluation and the replicas of a host share it."""

import threading
from dataclasses import dataclass, field

from shardset.errors import ShardsetError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import LoadedSet


@dataclass(slots=True)
class _Last:
    """The set that was loaded last, and its URL."""

    url: str = ""
    loaded: LoadedSet | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_last = _Last()


def load_once(url: str) -> LoadedSet:
    """The set at a URL: the one that was loaded last if the head of its manifest is still the same, else loaded now."""
    with _last.lock:
        if _last.loaded is None or _last.url != url or not _is_current(_last.loaded, url):
            _last.loaded = None  # a large one is not kept beside the next
            _last.loaded, _last.url = manifests.load(url), url
        return _last.loaded


def _is_current(loaded: LoadedSet, url: str) -> bool:
    name = url.rpartition("/")[2] if url.endswith(".json") else naming.MANIFEST
    try:
        return manifests.read_head(loaded.storage, name).digest == loaded.manifest.digest
    except ShardsetError:
        return False  # loading it again says what is wrong
