"""What is in an input folder, and what a path there tells about an image."""

import os
from itertools import islice

from shardset.errors import NotFound
from shardset.storage.base import Stat, Storage
from shardset.storage.open import is_absolute, open_file

UNREADABLE = "no permission to read it"
"""The reason of a rejected file for which `may_read` is false."""

UNKNOWN_FIELD = "img"
"""The field of an image whose path does not tell its format; the build corrects it by content."""


def may_read(storage: Storage, name: str) -> bool:
    """Whether this user may read an object of the folder, or by an absolute path; a bucket only tells when it is read.

    True where nothing is: reading it says so.
    """
    if is_absolute(name):
        storage, name = open_file(name)
    path = f"{storage.url}/{name}"
    return storage.is_remote or os.access(path, os.R_OK, effective_ids=True) or not os.path.exists(path)


def stat_or_none(storage: Storage, name: str) -> Stat | None:
    """The object of that name; None if there is none."""
    try:
        return storage.stat(name)
    except NotFound:
        return None


def has_prefix(storage: Storage, prefix: str) -> bool:
    """Whether the name of any object starts with `prefix`."""
    return any(True for _ in storage.list(prefix))


def first_names(storage: Storage, most: int = 6) -> str:
    """The first names in the folder, for a message."""
    names = [stat.name for stat in islice(storage.list(), most + 1)]
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "") or "nothing"


def extension(path: str) -> str:
    """The last extension in lower case, without its dot; empty if there is none."""
    return split_extension(path)[1].lower()


def without_extension(path: str) -> str:
    """The path without its last extension."""
    return split_extension(path)[0]


def split_extension(path: str) -> tuple[str, str]:
    """`posixpath.splitext` in a third of its time, without the dot; a name's leading dots begin no extension."""
    stem, _, last = path.rpartition(".")
    return (stem, last) if "/" not in last and stem.rpartition("/")[2].strip(".") else (path, "")


def is_hidden(path: str) -> bool:
    """Whether the file or a folder above it starts with a dot."""
    return path.startswith(".") or "/." in path


def is_text(path: str) -> bool:
    """Whether the path is valid Unicode, which the name of a local file need not be."""
    return path.isascii() or printable(path) == path


def printable(path: str) -> str:
    """The path with every byte that is not UTF-8 written as `\\xNN`."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
