"""The one door to the files below `plan/`: each whole file carries a frame, which is checked before the file is used.

The frame says which build wrote the file, how long it is, and its CRC32C. What is read by range carries no frame: the
ByteRange, UnitRef or Extent that names it knows its length and CRC32C.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from pipelines.plan import paths
from shardset.errors import ConfigError, ManifestError, NotFound, PreconditionFailed, SourceError
from shardset.format import naming
from shardset.format.frame import frame, has_frame, open_frame
from shardset.storage.base import ABSENT, Storage

R = TypeVar("R")
T = TypeVar("T")

START_OVER = (
    f"remove {naming.PLAN_FOLDER} at the output (and the shards there that no manifest lists), "
    "then build again with --overwrite"
)
"""What to do about a file of the plan that is damaged or missing."""

_READ_AHEAD = 64

_SIGNS_OF_ANOTHER_BUILD = (NotFound, PreconditionFailed, ConfigError, ManifestError, SourceError)
"""What a step may raise because another build has replaced or removed what this one wrote."""


class StoredFile(NamedTuple):
    """A file of the plan; `build` is None if a version of this program wrote it that knew no frames."""

    build: str | None
    content: bytes | memoryview


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """The plan files of one build at its output; pickles.

    `build` is the digest of what is built. Every file carries it; a file that carries another digest is not used.
    """

    output: Storage
    build: str

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Writes one whole file."""
        write(self.output, name, self.build, content)

    def read(self, name: str) -> memoryview:
        """The content of a file; NotFound, ConfigError if it is damaged, ManifestError if it is another build's."""
        try:
            file = read_checked(lambda: self.output.read(name), open_frame)
        except ValueError as error:
            raise damaged(self.output, name, error) from error
        if file.build != self.build:
            raise another_build(self.output, name)
        return file.content

    def read_each(self, names: Iterable[str]) -> Iterator[memoryview]:
        """The content of each file, in order."""
        return in_order(self.output, names, self.read)

    def read_record(self, name: str, kind: type[T]) -> T:
        """A JSON record; raises what `read` does."""
        return decode_record(self.output, name, self.read(name), kind)

    def find(self, name: str) -> bytes | memoryview | None:
        """The content of a file; None if there is none, or if another build left it."""
        file = find(self.output, name)
        return file.content if file and file.build == self.build else None

    def find_record(self, name: str, kind: type[T]) -> T | None:
        """A JSON record; None if there is none, or if another build left it."""
        content = self.find(name)
        return None if content is None else decode_record(self.output, name, content, kind)

    def check_current(self) -> None:
        """Raises ManifestError if another build has begun at the output."""
        file = find(self.output, paths.BUILD)
        if file is None or file.build != self.build:
            raise another_build(self.output, paths.BUILD)

    @contextmanager
    def while_current(self) -> Iterator[None]:
        """A block that runs only while the output is this build's; an error that another build caused says so."""
        self.check_current()
        try:
            yield
        except _SIGNS_OF_ANOTHER_BUILD:
            self.check_current()
            raise

    def replaceable(self, name: str) -> str:
        """The generation of a file that this build may replace; whatever is written later has another one."""
        generation = generation_of(self.output, name)
        self.check_current()  # afterwards: the generation was there before any other build began
        return generation


def write(
    output: Storage, name: str, build: str, content: bytes | memoryview, *, if_generation: str | None = None
) -> None:
    """Writes one whole file of that build."""
    with output.writer(name, if_generation=if_generation) as out:
        out.write(content)
        out.write(frame(build, content))


def find(output: Storage, name: str) -> StoredFile | None:
    """A file of any build or version; None if there is none. Raises ConfigError if it is damaged."""
    try:
        return read_checked(lambda: output.read(name), _open_any_version)
    except NotFound:
        return None
    except ValueError as error:
        raise damaged(output, name, error) from error


def find_record(output: Storage, name: str, kind: type[T]) -> T | None:
    """A JSON record of any build; None if there is none."""
    file = find(output, name)
    return decode_record(output, name, file.content, kind) if file else None


def decode_record(output: Storage, name: str, content: bytes | memoryview, kind: type[T]) -> T:
    """A JSON record as `kind`; ConfigError if it is none."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{output.url}/{name}: not readable ({error}); it is damaged or of another version: {START_OVER}"
        ) from error


def encode_record(record: msgspec.Struct) -> bytes:
    """A record as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def read_checked(read: Callable[[], bytes], check: Callable[[bytes], T], wrong: type[Exception] = ValueError) -> T:
    """What `check` makes of the bytes; reads them once more where it raises `wrong`."""
    try:
        return check(read())
    except wrong:
        return check(read())


def in_order(output: Storage, names: Iterable[T], read: Callable[[T], R]) -> Iterator[R]:
    """What `read` returns for each name, in order. Reads ahead in a remote storage; holds a few results."""
    if output.reads_at_once == 1:
        yield from map(read, names)
        return
    remaining = iter(names)
    with ThreadPoolExecutor(output.reads_at_once) as pool:
        while batch := list(islice(remaining, _READ_AHEAD)):
            yield from pool.map(read, batch)


def generation_of(output: Storage, name: str) -> str:
    """The generation of a file, ABSENT if there is none."""
    try:
        return output.stat(name).generation
    except NotFound:
        return ABSENT


def damaged(output: Storage, name: str, error: ValueError) -> ConfigError:
    """The error for a file that was read twice and is not what was written."""
    return ConfigError(f"{output.url}/{name}: not readable ({error}, read twice); it is damaged: {START_OVER}")


def another_build(output: Storage, name: str) -> ManifestError:
    """The error for a file that is not of this build."""
    return ManifestError(
        f"{output.url}/{name}: another build began there meanwhile; choose another --output for one of the two"
    )


def _open_any_version(data: bytes) -> StoredFile:
    """Raises ValueError if the frame does not fit; content without a frame must be JSON, as older versions wrote it."""
    if has_frame(data):
        return StoredFile(*open_frame(data))
    try:
        json.loads(data)
    except RecursionError as error:
        raise ValueError("its JSON nests too deeply") from error
    return StoredFile(None, data)
