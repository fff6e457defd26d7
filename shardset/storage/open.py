"""The storage of a folder or a file, by its address."""

import os
from pathlib import Path

from shardset.errors import ConfigError
from shardset.storage.base import CLIMBING, Storage
from shardset.storage.local import LocalStorage
from shardset.storage.memory import MemoryStorage

_SCHEMES = ("gs", "memory")


def open_storage(url: str) -> Storage:
    """The storage of a folder: a local path, `gs://bucket/prefix` or `memory://name/prefix`; ConfigError otherwise."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in _SCHEMES:
        raise ConfigError(
            f"{url}: storage {scheme!r} is not known; use a local path, gs://bucket/prefix or memory://name"
        )
    root, _, prefix = rest.partition("/") if separator else (url, "", "")
    if not root:
        raise ConfigError(f"{url!r} names no storage; use a local path, gs://bucket/prefix or memory://name/prefix")
    if not separator:
        _refuse_slip(url)
        return LocalStorage(_absolute(url))
    if "@" in root or ":" in root:
        raise ConfigError(f"{url}: an address of storage holds no user, password or port; leave them out")
    if scheme == "memory":
        return MemoryStorage(root, prefix.rstrip("/"))
    from shardset.storage.gcs import GcsStorage  # late: Google's client takes half a second to import

    return GcsStorage(root, prefix.rstrip("/"))


def open_file(url: str) -> tuple[Storage, str]:
    """The storage of the folder of a file, and the file's name there; ConfigError if `url` names a folder."""
    folder, _, name = url.rpartition("/")
    if name in CLIMBING or (is_address(url) and not is_address(folder)):
        raise ConfigError(f"{url!r} names a folder, expected a file in it")
    return open_storage(folder or ("/" if url.startswith("/") else ".")), name


def is_address(url: str) -> bool:
    """Whether a URL has a scheme, as all remote storage has; otherwise it is a local path."""
    return "://" in url


def is_absolute(path: str) -> bool:
    """Whether a path means the same in every working folder: it begins at the root or is an address."""
    return path.startswith("/") or is_address(path)


def bucket_of(url: str) -> str | None:
    """The bucket of a `gs://` URL; None for other storage."""
    return url.removeprefix("gs://").partition("/")[0] if url.startswith("gs://") else None


def local_folder(path: str, what: str) -> Path:
    """The absolute path of a local folder; raises ConfigError for an address or a `~` that no shell replaced."""
    if is_address(path):
        raise ConfigError(f"{what} {path}: expected a local folder, not an address")
    return Path(open_storage(path).url)


def _refuse_slip(url: str) -> None:
    scheme, colon, rest = url.partition(":")
    if colon and scheme in _SCHEMES:
        raise ConfigError(
            f"{url}: an address has two slashes after {scheme}:, such as {scheme}://{rest.lstrip('/')}; for a folder "
            f"of this name here write ./{url}"
        )
    if url == "~" or url.startswith("~/"):
        raise ConfigError(
            f"{url}: ~ is not your home folder here, since a shell leaves it behind --flag= and in quotes; write the "
            f"whole path, or ./{url} for a folder of this name"
        )


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: the folder in which the command was started is gone; change into another, or give the whole path"
        ) from error
