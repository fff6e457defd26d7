"""The base of all formats: a shard set, and the paths or URLs that lead from the side files to its tars."""

import hashlib
import json
import os.path
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shardset.checksum import crc32c_text, extend_crc32c
from shardset.errors import ConfigError, DamagedShard
from shardset.format.manifest import Manifest, Shard
from shardset.storage.base import Storage
from shardset.storage.checked import pieces_of, read_twice
from shardset.storage.open import is_address

Location = Literal["beside", "relative", "anywhere"]
"""Where the files of a format may be: in the set's own folder, wherever a relative path leads to the tars, or anywhere
because the format takes URLs."""


@dataclass(frozen=True, slots=True)
class SideFile:
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

    def shards(self) -> list[Shard]:
        """The shards of all splits."""
        return [shard for split in self.manifest.splits.values() for shard in split.shards]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFormat:
    """The side files of one reader: where they may be, and the function that makes them.

    `check` raises ConfigError for a set that the reader can't read.
    """

    location: Location
    files: Callable[[ShardSet], Iterator[SideFile]]
    check: Callable[[Manifest], None] = lambda manifest: None


def prefix_of(url: str, output: str, location: Location, name: str) -> str:
    """The prefix that leads from the folder `output` to the set at `url`; ConfigError if the format has none."""
    if output == url:
        return ""
    if location == "beside":
        raise ConfigError(f"{name} reads its files only beside the tars; leave --output out, or copy the set first")
    if not (is_address(url) or is_address(output)):
        return os.path.relpath(os.path.realpath(url), os.path.realpath(output)) + "/"  # a link's .. is its target's
    if not is_address(url):
        raise ConfigError(
            f"no path leads from {output} to the tars in {url}; leave --output out, or copy the set first"
        )
    if location == "relative":
        raise ConfigError(
            f"{name} takes relative paths only, and none leads from {output} to {url}; leave --output out"
        )
    return f"{url}/"


def md5_of(storage: Storage, shard: Shard) -> str:
    """The MD5 of a tar, from one pass over its bytes; raises DamagedShard if they do not match the manifest."""
    md5, crc32c = read_twice(lambda: _sums(storage, shard), lambda sums: sums[1] == shard.crc32c)
    if crc32c != shard.crc32c:
        raise DamagedShard(
            f"{storage.url}/{shard.path}: its CRC32C is {crc32c}, the manifest says {shard.crc32c}; "
            "rebuild the shard with --only-shards"
        )
    return md5


def _sums(storage: Storage, shard: Shard) -> tuple[str, str]:
    """MD5 and CRC32C of a tar."""
    md5, crc = hashlib.md5(usedforsecurity=False), 0
    for data in pieces_of(storage, shard.path, 0, shard.num_bytes):
        md5.update(data)
        crc = extend_crc32c(crc, data)
    return md5.hexdigest(), crc32c_text(crc)


def json_bytes(value: Any) -> bytes:
    """Indented JSON with a final newline."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
