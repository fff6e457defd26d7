"""What is in an input folder, for the survey and for error messages."""

import os
from itertools import islice

from shardset.errors import NotFound
from shardset.storage.base import Stat, Storage
from shardset.storage.open import is_absolute, open_file

UNREADABLE = "no permission to read it"
"""The reason of a rejected file for which `may_read` is false."""


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
