"""Reads and writes the files below `plan/`.

A complete file ends with a frame, which is checked before the file is used: a line behind the
content with the digest of the build that wrote it, the length, and the CRC32C of the content and
the line before it. Readers of JSON or Arrow that stop at its end read such a file too.

Files that are read by range have no frame: the UnitRef or Extent holds the length and the CRC32C.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from pipelines.plan import paths
from shardset.checksum import crc32c_of
from shardset.errors import ConfigError, ManifestError, NotFound, PreconditionFailed, SourceError
from shardset.format import naming
from shardset.prepared import JSON_ERRORS, prepared
from shardset.storage.base import ABSENT, ObjectWriter, Storage, stat_or_none
from shardset.storage.checked import read_twice
from shardset.storage.many import in_order

R = TypeVar("R")
T = TypeVar("T")

_MARK = b"\nshardset "
_BUILD_BYTES, _LENGTH_BYTES, _CRC_BYTES = 16, 16, 8
NUM_BYTES = len(_MARK) + _BUILD_BYTES + 1 + _LENGTH_BYTES + 1 + _CRC_BYTES + 1
"""The bytes that a frame adds to a file."""

START_OVER = (
    f"remove {naming.PLAN_FOLDER} at the output (and the shards there that no manifest lists), "
    "then build again with --overwrite"
)
"""The advice for a file of the plan that is damaged or missing."""

_SIGNS_OF_ANOTHER_BUILD = (NotFound, PreconditionFailed, ConfigError, ManifestError, SourceError)
"""The errors of a step whose files another build has replaced or removed."""


class Framed(NamedTuple):
    """The content of a file, and the digest of the build that it belongs to."""

    build: str
    content: memoryview


def frame(build: str, content: bytes | memoryview) -> bytes:
    """The line to put behind the content of a file of that build; `build` has at most 16 letters
    and digits.
    """
    line = b"%s%s %016x " % (_MARK, build.encode().rjust(_BUILD_BYTES, b"-"), len(content))
    return b"%s%08x\n" % (line, crc32c_of(content, line))


def open_frame(data: bytes) -> Framed:
    """The content and its build; raises ValueError, which says what is wrong with the bytes."""
    content, end = memoryview(data)[:-NUM_BYTES], data[-NUM_BYTES:]
    if len(end) < NUM_BYTES or not end.startswith(_MARK):
        raise ValueError(f"its {len(data)} bytes don't end with a length and a CRC32C")
    build = end[len(_MARK) : len(_MARK) + _BUILD_BYTES].lstrip(b"-").decode("ascii", "replace")
    if end != frame(build, content):
        raise ValueError("its length and CRC32C don't fit its bytes")
    return Framed(build, content)


@prepared
class _Claimed(msgspec.Struct):
    """The part of a BuildFile that matters here."""

    claim: str = ""


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """The plan files of one build at its output; pickles.

    `build` is the digest of the build. Files with another digest belong to another build and are
    not used. The launcher that prepares the output has a `claim` too, which another launcher of the
    same build may take from it.
    """

    output: Storage
    build: str
    claim: str = ""

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Writes one complete file; never replaces one of a build that has started since."""
        try:
            write(self.output, name, self.build, content, if_generation=ABSENT)
        except PreconditionFailed:
            write(self.output, name, self.build, content, if_generation=self.replaceable(name))

    def writer(self, name: str) -> ObjectWriter:
        """A writer of a file without a frame; PreconditionFailed at its end if another file has
        arrived meanwhile.
        """
        return self.output.writer(name, if_generation=self.replaceable(name))

    def read(self, name: str) -> memoryview:
        """The content of a file; NotFound, ConfigError if it is damaged, ManifestError if it is
        another build's.
        """
        file = read_checked(self.output, name, lambda: open_frame(self.output.read(name)))
        if file.build != self.build:
            raise another_build(self.output, name)
        return file.content

    def read_record(self, name: str, kind: type[T]) -> T:
        """A JSON record; raises the same errors as `read`."""
        return decode_record(self.output, name, self.read(name), kind)

    def read_records(self, names: Iterable[str], kind: type[T]) -> Iterator[T]:
        """The JSON record of each file, in order; raises the same errors as `read`."""
        at_once = self.output.reads_at_once
        return in_order(at_once, names, lambda name: self.read_record(name, kind))

    def find(self, name: str) -> memoryview | None:
        """The content of a file; None if it is absent or of another build."""
        file = find(self.output, name)
        return file.content if file and file.build == self.build else None

    def check_current(self) -> None:
        """Raises ManifestError if another build has started at the output."""
        file = find(self.output, paths.BUILD)
        if file is None or file.build != self.build:
            raise another_build(self.output, paths.BUILD)
        if (
            self.claim
            and decode_record(self.output, paths.BUILD, file.content, _Claimed).claim != self.claim
        ):
            raise another_build(self.output, paths.BUILD)

    @contextmanager
    def while_current(self) -> Iterator[None]:
        """A block whose errors say so if another build caused them.

        It does not ask first. A build that starts there replaces the files that a step reads, and
        a step replaces no file without a look at whose output it is.
        """
        try:
            yield
        except _SIGNS_OF_ANOTHER_BUILD:
            self.check_current()
            raise

    def replaceable(self, name: str) -> str:
        """The generation of a file that this build may replace."""
        generation = generation_of(self.output, name)
        if generation != ABSENT:
            # After the look-up: a file that another build writes later then has another generation.
            self.check_current()
        return generation


def write(
    output: Storage,
    name: str,
    build: str,
    content: bytes | memoryview,
    *,
    if_generation: str | None = None,
) -> None:
    """Writes one complete file of a build."""
    with output.writer(name, if_generation=if_generation) as out:
        out.write(content)
        out.write(frame(build, content))


def find(output: Storage, name: str) -> Framed | None:
    """A file of any build; None if it is absent. Raises ConfigError if it is damaged."""
    try:
        return read_checked(output, name, lambda: open_frame(output.read(name)))
    except NotFound:
        return None


def find_record(output: Storage, name: str, kind: type[T]) -> T | None:
    """A JSON record of any build; None if it is absent."""
    file = find(output, name)
    return decode_record(output, name, file.content, kind) if file else None


def decode_record(output: Storage, name: str, content: bytes | memoryview, kind: type[T]) -> T:
    """A JSON record as `kind`; ConfigError if it is malformed."""
    try:
        return msgspec.json.decode(content, type=kind)
    except JSON_ERRORS as error:
        raise ConfigError(
            f"{output.url}/{name}: not readable ({error}); it is damaged or of another version:"
            f" {START_OVER}"
        ) from error


def encode_record(record: msgspec.Struct) -> bytes:
    """A record as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def read_checked(output: Storage, name: str, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, which reads a file and raises ValueError if it is damaged;
    ConfigError after two.
    """
    try:
        return read_twice(attempt, error=ValueError)
    except ValueError as error:
        raise ConfigError(
            f"{output.url}/{name}: not readable ({error}, read twice); it is damaged: {START_OVER}"
        ) from error


def generation_of(output: Storage, name: str) -> str:
    """The generation of a file; ABSENT if it does not exist."""
    stored = stat_or_none(output, name)
    return stored.generation if stored else ABSENT


def another_build(output: Storage, name: str) -> ManifestError:
    """The error for a file of another build."""
    return ManifestError(
        f"{output.url}/{name}: another build began there meanwhile; build elsewhere, or append "
        "again when that one is done"
    )
