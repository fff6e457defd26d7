"""What is in an input folder, for the survey and for error messages."""

from itertools import islice

from shardset.errors import NotFound
from shardset.storage.base import Stat, Storage


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
