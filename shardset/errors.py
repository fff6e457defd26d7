"""What can go wrong, in one tree.

    ShardsetError
    ├── ConfigError          what was asked for can't be done
    │   └── BudgetTooSmall   in so little memory; it knows how much is enough
    ├── SourceError          raw input is missing or not what its format says
    │   ├── ChangedInput     it was one thing when planned and another when written
    │   └── UndecodableImage no image that can be a sample comes out of the bytes
    ├── TooManyBad           more raw samples were rejected than allowed
    ├── ManifestError        a manifest is missing, broken or of a newer version
    ├── DamagedShard         stored bytes differ from what the manifest or index says
    ├── DecoderLost          a process that decoded images for this one ended
    └── StorageError         storage said no
        ├── NotFound
        ├── PreconditionFailed   something already stands there, or another generation does
        └── TransientError       worth another try: time-out, 429, 5xx, reset, short body

Every message says where, what was found, what was expected and what to do.
"""

import sys

from shardset.addresses import masked


class ShardsetError(Exception):
    """The root: a failure that a user, a file or a network can cause. Its message shows no password of an address."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(masked(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(ShardsetError):
    """What was asked for can't be done."""


class BudgetTooSmall(ConfigError):
    """What was asked for can't be done in so little memory; `enough` bytes are."""

    def __init__(self, message: str, enough: int = 0) -> None:
        super().__init__(message)
        self.enough = enough


class SourceError(ShardsetError):
    """Raw input is missing or not what its format says."""


class ChangedInput(SourceError):
    """An input was one thing when it was planned and is another now."""


class TooManyBad(ShardsetError):
    """More raw samples were rejected than the configuration allows."""


class ManifestError(ShardsetError):
    """A manifest is missing, broken or of a newer version."""


class DamagedShard(ShardsetError):
    """Stored bytes differ from what the manifest or the index says."""


class UndecodableImage(SourceError):
    """No image that can be a sample comes out of the bytes.

    The build counts images by `reason`, which is short and stable there; `detail` is for the reader of the message.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return masked(f"{self.reason}: {self.detail}" if self.detail else self.reason)


class DecoderLost(ShardsetError):
    """A process that decoded images for this one ended."""


class StorageError(ShardsetError):
    """Storage refused or failed."""


class NotFound(StorageError):
    """Nothing is stored under that name (or that generation of it is gone)."""


class PreconditionFailed(StorageError):
    """Something already stands under that name, or another generation than expected."""


class TransientError(StorageError):
    """Worth another try: a time-out, 429, 5xx, a reset connection, a short body."""


def missing_library(error: ModuleNotFoundError, extra: str) -> str:
    """What to do about a library that comes with an extra of the installation."""
    return (
        f"the library {error.name} is not installed in the environment of {sys.executable}; `pip install "
        f"'shardset[{extra}]'` brings it, in a clone `make env`, then `source .venv/bin/activate`"
    )
