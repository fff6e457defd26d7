"""Folders that have to be on this machine."""

from pathlib import Path

from shardset.errors import ConfigError
from shardset.storage.base import open_storage


def local_folder(path: str, what: str) -> Path:
    """The absolute path of a folder; raises ConfigError for an address, and for `~`, which a shell was to replace."""
    if "://" in path:
        raise ConfigError(f"{what} {path}: expected a local folder, not an address")
    return Path(open_storage(path).url)
