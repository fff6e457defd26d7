"""The elements of the arrays in a JSON file, one by one, in a few MB of memory whatever the size of
the file.
"""

import io
import json
import re
from collections.abc import Iterator
from typing import IO

from shardset.errors import SourceError

PIECE_CHARS = 1 << 20
MAX_CHARS = 1 << 25
"""Limit of one element, to bound memory."""

_MARGIN = 1 << 10
"""An element that ends so near to the end of a piece may be part of something longer."""

_NAMES = r'(?:[\s\],]*"((?:[^"\\]|\\.)*)"\s*:\s*\[?)*'
_before = re.compile(_NAMES + r"[\s,]*").match
_end = re.compile(_NAMES + r"[\s\]]*\}\s*").fullmatch
_find_stop = json.JSONDecoder().raw_decode


def elements(file: IO[bytes], where: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each element of each array that the object in the file holds by name.

    A value that is no array is one element. Bytes that are not UTF-8 become surrogates. Raises
    SourceError, which begins with `where`, for a file that is no such object.
    """
    stream = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
    name, rest = "", stream.read(PIECE_CHARS).lstrip()
    is_more, rest = rest[:1] == "{", rest[1:]
    while is_more and len(rest) < MAX_CHARS:
        piece = stream.read(max(PIECE_CHARS, len(rest)))
        text, stop, is_more = rest + piece, 0, bool(piece)
        while before := _before(text, at := stop):
            try:
                _, stop = _find_stop(text, before.end())
            except (ValueError, RecursionError):
                break
            if is_more and stop > len(text) - _MARGIN:
                break
            name = name if before[1] is None else before[1]
            yield name, text[before.end() : stop]
        rest = text[at:]
    if is_more or not _end(rest):
        raise SourceError(f"{where}: not JSON, or cut off, before {rest:.60}; write it again")
