"""The base of all formats: a shard set, and the paths or URLs that lead from the side files to its
tars.
"""

import json
import os.path
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardset.errors import ConfigError
from shardset.format.manifest import Manifest, Shard
from shardset.storage.base import Storage
from shardset.storage.open import is_address


class SideFile(NamedTuple):
    """One file for another reader; `path` is relative to the output folder."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """A shard set. `prefix` leads from the output folder to the paths of the manifest."""

    manifest: Manifest
    storage: Storage
    prefix: str

    def address(self, shard: Shard) -> str:
        """The path or URL of a tar in a side file."""
        return self.prefix + shard.path


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFormat:
    """The side files of one reader, and the function that makes them.

    They are beside the tars; `takes` says what may lead to the tars from another folder: relative
    paths, URLs. `check` raises ConfigError for a set that the reader can't read.
    """

    files: Callable[[ShardSet], Iterator[SideFile]]
    takes: Collection[str] = ()
    check: Callable[[Manifest], None] = lambda manifest: None


def prefix_of(url: str, output: str, takes: Collection[str], name: str) -> str:
    """The prefix that leads from the folder `output` to the set at `url`; ConfigError if the format
    takes none.
    """
    if output == url:
        return ""
    if is_address(url) and "URLs" in takes:
        return f"{url}/"
    if not (is_address(url) or is_address(output)) and "relative paths" in takes:
        # a link's .. is its target's
        return os.path.relpath(os.path.realpath(url), os.path.realpath(output)) + "/"
    wanted = (
        f"takes {' and '.join(takes)} to the tars"
        if takes
        else "reads its files only beside the tars"
    )
    raise ConfigError(
        f"{name} {wanted}, and none leads from {output} to {url}; leave --output out, or copy the"
        " set first"
    )


def json_bytes(value: Any) -> bytes:
    """Indented JSON with a final newline."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
