"""The exceptions, in one tree, and what turns others into them.

Every message says where, what was found, what was expected and what to do.
"""

import operator
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import SupportsIndex

# A port is not a password, which may contain `/` and `@`: all goes, up to the last @.
_PASSWORD = r"[^/\s:@\[\"']+:(?!//|\d+(?:[/?\s:;,)\"']|$))[^\s\"']"
_USER = re.compile(rf"(?<=://)(?:{_PASSWORD}*@|[^/\s]*@)|(?<![^\s=(\"']){_PASSWORD}*@(?=[\w.\[])")
_KEYS = re.compile(rf"(?<=://){_PASSWORD}+")  # KEY:SECRET in place of a bucket
_QUERY = re.compile(r"(\w://[^\s?]*\?)[^\s\"']+")  # which signs an address


def masked(text: str) -> str:
    """The text with `***` for user, password, keys and query of addresses, such as
    `http://***@host/a?***`.
    """
    for secret, shown in ((_USER, "***@"), (_KEYS, "***"), (_QUERY, r"\1***")):
        text = secret.sub(shown, text)
    return text


def printable(text: str) -> str:
    """The text with control characters escaped: no name in the input, no peer and no server can
    control a terminal.
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


DOCS = "https://github.com/shardset/shardset/blob/main/docs"
"""The address of the pages that messages name."""

REPAIR = "restore it, or write it again with `shardset repair SET`"
"""What to do about a missing or damaged file of a set."""


class ShardsetError(Exception):
    """A failure that a user, a file or a network can cause; the root of the tree.

    Its message is one line without passwords, whatever it was made of.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(masked(arg)) if isinstance(arg, str) else arg for arg in args))


class ConfigError(ShardsetError):
    """The configuration, or a call, asks for something that can't be done."""


class BudgetTooSmall(ConfigError):
    """The memory budget is too small; `enough` bytes would do.

    Attributes:
        enough: A sufficient budget in bytes.
    """

    def __init__(self, message: str, enough: int = 0) -> None:
        super().__init__(message)
        self.enough = enough


class SourceError(ShardsetError):
    """Raw input is missing or not what its format says."""


class ChangedInput(SourceError):
    """An input has changed since it was planned."""


class TooManyBad(ShardsetError):
    """More raw samples were rejected than the configuration allows."""


class ManifestError(ShardsetError):
    """A manifest is missing, broken or of a newer version."""


class MissingSet(ManifestError, ConfigError):
    """There is no set, version or split of the name that was given."""


class DamagedShard(ShardsetError):
    """Stored bytes differ from what the manifest or the index lists."""


class MissingLibrary(ShardsetError, ModuleNotFoundError):
    """A library that an extra installs is missing; also a ModuleNotFoundError."""


class UndecodableImage(SourceError):
    """The bytes give no image that can be a sample; `reason` says why.

    Attributes:
        reason: Short and stable: the build counts images by it.
        detail: For the reader of the message.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return printable(masked(f"{self.reason}: {self.detail}" if self.detail else self.reason))


class BadTarget(UndecodableImage):
    """A field beside an image gives no target."""


class DecoderLost(ShardsetError):
    """A decoding process died."""


class StorageError(ShardsetError):
    """Storage refused or failed."""


class NotFound(StorageError):
    """Nothing is stored under that name, or that generation of it is gone."""


class PreconditionFailed(StorageError):
    """Another object or generation than expected is stored under that name."""


class TransientError(StorageError):
    """Worth another try: a timeout, 429, 5xx, a reset connection, a short body."""


class Throttled(TransientError):
    """The server refuses a request because there are too many; it asks for `retry_after_s` seconds.

    Attributes:
        retry_after_s: The pause in seconds that the server asks for (429, 503).
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def require_int(name: str, value: SupportsIndex) -> int:
    """`value` as a Python int, whatever its library; raises ConfigError for text, a fraction or
    None.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}, expected a whole number") from None


def missing_library(error: ModuleNotFoundError, extra: str) -> str:
    """The message for a missing library that an extra of the distribution installs."""
    return (
        f"the library {error.name} is not installed in the environment of {sys.executable}; `pip"
        f" install 'shardset[{extra}]'` brings it, in a clone `make env`, then `source"
        " .venv/bin/activate`"
    )


@contextmanager
def brought_by(extra: str) -> Iterator[None]:
    """Has the imports inside raise MissingLibrary, naming the extra, where a library is not
    installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "shardset").partition(".")[0] == "shardset":
            raise
        missing = MissingLibrary(missing_library(error, extra))
        missing.name = error.name
        raise missing from error
