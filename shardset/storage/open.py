"""The storage of a folder or a file, by its address."""

import os
import re
from importlib import import_module
from pathlib import Path

from shardset.errors import ConfigError, brought_by
from shardset.storage.base import CLIMBING, Storage
from shardset.storage.local import LocalStorage

_CLASSES = {
    "gs": ("gcs", "GcsStorage"),
    "s3": ("s3", "S3Storage"),
    "az": ("s3", "AzureStorage"),
    "https": ("https", "HttpsStorage"),
    "http": ("https", "HttpStorage"),
    "memory": ("memory", "MemoryStorage"),
}
_EXPECTED = (
    "use a local path, gs://bucket/prefix, s3://bucket/prefix, az://container/prefix,"
    " https://host/folder or memory://name/prefix"
)
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")


def open_storage(url: str) -> Storage:
    """The storage of a folder, by its path or address.

    Args:
        url: A local path, `gs://bucket/prefix`, `s3://bucket/prefix`, `az://container/prefix`,
            `https://host/folder` (to read) or `memory://name/prefix` (in this process).

    Returns:
        The Storage. Nothing is read or created before its first use.

    Raises:
        ConfigError: The address has another form.
        MissingLibrary: The library for `s3://` and `az://` is not installed.

    Examples:
        >>> import shardset
        >>> storage = shardset.open_storage("shards")
        >>> storage.stat("manifest.json").num_bytes > 0
        True
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in _CLASSES:
        raise ConfigError(f"{url}: storage {scheme!r} is not known; {_EXPECTED}")
    root, _, prefix = rest.partition("/") if separator else (url, "", "")
    if not root or "\0" in url:
        raise ConfigError(f"{url!r} names no storage; {_EXPECTED}")
    if not separator:
        _refuse_slip(url)
        return LocalStorage(os.path.abspath(url))
    if "@" in root or (":" in root and not scheme.startswith("http")):
        raise ConfigError(
            f"{url}: an address of storage holds no user, password or port; leave them out"
        )
    module, name = _CLASSES[scheme]
    with brought_by("s3"):
        # Late: not all need requests and google-auth, and obstore is an extra.
        kind = getattr(import_module(f"shardset.storage.{module}"), name)
    storage: Storage = kind(root, prefix.rstrip("/"))
    return storage


def open_file(url: str) -> tuple[Storage, str]:
    """The storage of the folder of a file, and the file's name there; ConfigError if `url` names a
    folder.
    """
    folder, _, name = url.rpartition("/")
    if name in CLIMBING or (is_address(url) and not is_address(folder)):
        raise ConfigError(f"{url!r} names a folder, expected a file in it")
    return open_storage(folder or ("/" if url.startswith("/") else ".")), name


def is_address(url: str) -> bool:
    """Whether a URL has a scheme, as all remote storage has; otherwise it is a local path."""
    return "://" in url


def is_web(url: str) -> bool:
    """Whether a URL is of a web server, which lists nothing."""
    return url.startswith(("https://", "http://"))


def is_absolute(path: str) -> bool:
    """Whether a path means the same in every working folder: it begins at the root or is an
    address.
    """
    return path.startswith("/") or is_address(path)


def bucket_of(url: str) -> str | None:
    """The bucket of a `gs://` URL; None for other storage."""
    return url.removeprefix("gs://").partition("/")[0] if url.startswith("gs://") else None


def is_region(location: str) -> bool:
    """Whether a bucket's location is one region, not a name for several such as `EU` or `NAM4`."""
    return _REGION.fullmatch(location.lower()) is not None


def local_folder(path: str, what: str) -> Path:
    """The absolute path of a local folder; raises ConfigError for an address or a `~` that no shell
    replaced.
    """
    if is_address(path):
        raise ConfigError(f"{what} {path}: expected a local folder, not an address")
    return Path(open_storage(path).url)


def _refuse_slip(url: str) -> None:
    scheme, colon, rest = url.partition(":")
    if colon and scheme in _CLASSES:
        raise ConfigError(
            f"{url}: an address has two slashes after {scheme}:, such as"
            f" {scheme}://{rest.lstrip('/')}; for a folder of this name here write ./{url}"
        )
    if url == "~" or url.startswith("~/"):
        raise ConfigError(
            f"{url}: ~ is not your home folder here, since a shell leaves it behind --flag= and in"
            f" quotes; write the whole path, or ./{url} for a folder of this name"
        )
