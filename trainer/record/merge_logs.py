"""Merges the logs of several hosts by time. Imports nothing heavy: a laptop without torch can run it."""

import heapq
import re
from collections.abc import Iterable, Iterator

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\S+")


def merged(logs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The lines of logs, given as (name, text), by time, each as `TIME NAME LINE`.

    A line without a time belongs to the line before it and has its time.
    """
    stamped = [list(_stamped(name, text)) for name, text in logs]
    return (line for _, line in heapq.merge(*stamped, key=lambda pair: pair[0]))


def _stamped(name: str, text: str) -> Iterator[tuple[str, str]]:
    last = ""
    for line in text.splitlines():
        moment, _, rest = line.partition(" ")
        if not _STAMP.fullmatch(moment):
            moment, rest = last, line
        last = moment
        yield moment, f"{moment} {name} {rest}"
