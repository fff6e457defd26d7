"""Reads lists of keys, and refuses those that name no sample."""

import codecs
from collections.abc import Collection

from shardset.errors import ConfigError
from shardset.program import count, some_of
from shardset.storage.open import open_file

_SHOWN = 10


def read_keys(url: str) -> list[str]:
    """The keys in a text file, one in each line: UTF-8, or UTF-16 with a byte order mark.

    Any other text gives characters that no key has.
    """
    storage, name = open_file(url)
    data = storage.read(name)
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if is_utf16 else "utf-8-sig", "replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def refuse_unknown(unknown: Collection[str], where: str) -> None:
    """Raises ConfigError if any key is not in what `where` says; it names the first ones."""
    if unknown:
        raise ConfigError(
            f"{count(len(unknown), 'key')} not in {where}: {some_of(sorted(unknown), _SHOWN)};"
            " correct the list (UTF-8, or UTF-16 with a mark; a key in each line, without"
            " extension), then run again"
        )
