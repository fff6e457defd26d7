"""The one door to the whole files of `plan/`: each is written with a frame and compared with it before it is used.

What is read by range has none: its length and CRC32C are in the Part, line or extent that names it.
"""

import json
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from shardset.errors import ConfigError, ManifestError, NotFound
from shardset.format import naming
from shardset.format.frame import frame, has_frame, open_frame
from shardset.storage.base import ABSENT, Storage

T = TypeVar("T")

START_OVER = (
    f"remove {naming.PLAN_FOLDER} at the output (and the shards there that no manifest lists), "
    "then build again with --overwrite"
)
"""What to do about a file of the plan that is damaged or missing."""


class Found(NamedTuple):
    """A file of the plan; `build` is None where a version of this program wrote it that knew no frames."""

    build: str | None
    content: bytes | memoryview


def put(
    output: Storage, name: str, build: str, content: bytes | memoryview, *, if_generation: str | None = None
) -> None:
    """One whole file of that build."""
    with output.writer(name, if_generation=if_generation) as out:
        out.write(content)
        out.write(frame(build, content))


def find(output: Storage, name: str) -> Found | None:
    """A file of any build or version, None if there is none; ConfigError if it is damaged."""
    try:
        return checked(lambda: output.read(name), _framed_or_old)
    except NotFound:
        return None
    except ValueError as error:
        raise damaged(output, name, error) from error


def _framed_or_old(data: bytes) -> Found:
    """ValueError for what has a frame that does not fit; without any it must be JSON, as older versions wrote it."""
    if has_frame(data):
        return Found(*open_frame(data))
    try:
        json.loads(data)
    except RecursionError as error:
        raise ValueError("its JSON nests too deeply") from error
    return Found(None, data)


def read(output: Storage, name: str, build: str) -> memoryview:
    """A file of that build; NotFound, ConfigError if it is damaged, ManifestError if it is another build's."""
    try:
        found = checked(lambda: output.read(name), open_frame)
    except ValueError as error:
        raise damaged(output, name, error) from error
    if found.build != build:
        raise another_build(output, name)
    return found.content


def checked(read: Callable[[], bytes], check: Callable[[bytes], T], wrong: type[Exception] = ValueError) -> T:
    """What `check` makes of the bytes; where it finds them `wrong` they are read once more."""
    try:
        return check(read())
    except wrong:
        return check(read())


def generation_of(output: Storage, name: str) -> str:
    """The generation of what stands there, ABSENT if nothing does."""
    try:
        return output.stat(name).generation
    except NotFound:
        return ABSENT


def damaged(output: Storage, name: str, error: ValueError) -> ConfigError:
    """What to say of a file that was read twice and is not what was written."""
    return ConfigError(f"{output.url}/{name}: not readable ({error}, read twice); it is damaged: {START_OVER}")


def another_build(output: Storage, name: str) -> ManifestError:
    """What to say of a file that is not of this build."""
    return ManifestError(
        f"{output.url}/{name}: another build began there meanwhile; choose another --output for one of the two"
    )
