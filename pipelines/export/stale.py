"""Finds side files of other readers that name tars which are gone, or lack new ones."""

import re
from contextlib import suppress

from pipelines.export.formats import FORMATS
from shardset.errors import ConfigError, NotFound
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest
from shardset.storage.base import Storage

CARD = "README.md"
"""Hugging Face's card; people write in it, too."""

STALE = (
    "lists other tars than the newest version; make it again (`shardset export --overwrite`), or"
    " remove it"
)

_OTHERS = ("_info.json", ".nv-meta/.info.json")
"""The files of timm and Energon, whose tools make them of some tars or all."""

_TAR = re.compile(rb"(?<![/:\w*-])(?:[\w-]+/)?[\w*-]+\.tar")
"""A tar of the set, or all of a folder; no part of an address."""


def stale(storage: Storage, newest: Manifest) -> list[str]:
    """The side files in the folder of a set that don't list the tars of its newest version."""
    newest = manifests.opened(storage, newest)
    listed = dict[str, set[bytes]]()
    for make in FORMATS.values():
        with suppress(ConfigError):  # a reader that can't read this set
            listed |= {path: _tars_in(path, content) for path, content in make(newest, "")}
    tars = {shard.path.encode() for shard in newest.shards}
    names = set[str]()
    for name in {*listed, *_OTHERS, *(stat.name for stat in storage.list("wids-"))}:
        with suppress(NotFound):
            named = _tars_in(name, storage.read(name))
            if named and (named != listed[name] if name in listed else named - tars):
                names.add(name)
    return sorted(names)


def _tars_in(path: str, content: bytes) -> set[bytes]:
    return {tar for tar in _TAR.findall(content) if b"*" in tar or path != CARD}
