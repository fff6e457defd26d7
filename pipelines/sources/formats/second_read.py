"""What can't be read in a user's file is read again, once: damage in transfer does not repeat."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from shardset.errors import SourceError

T = TypeVar("T")


def read_again(read: Callable[[], T]) -> T:
    """What `read` returns, or what a second call does if the first raised SourceError."""
    try:
        return read()
    except SourceError:
        return read()


def rows_again(rows: Callable[[], Iterator[T]]) -> Iterator[T]:
    """What `rows()` yields. After a SourceError a second call goes on with the row that was not given yet."""
    num_given = 0
    try:
        for row in rows():
            yield row
            num_given += 1
    except SourceError:
        yield from islice(rows(), num_given, None)
