"""Where the versions of a shard set are: `manifest.json` is the newest, each older one is
`versions/N.json`.

A version is published by one conditional replacement of `manifest.json`, after the version before
it has been stored under its number. So there is always one newest version, and a version that is
stored never changes.
"""

import re
from typing import Annotated

import msgspec

from shardset.errors import ManifestError, MissingSet, NotFound
from shardset.format import naming
from shardset.prepared import JSON_ERRORS, prepared
from shardset.storage.base import Storage

FOLDER = naming.VERSIONS_FOLDER
TAGS = f"{FOLDER}tags/"

_PATH = re.compile(rf"{FOLDER}([1-9][0-9]{{0,8}})\.json", re.ASCII)
_NUMBER = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_TAG = re.compile(r"(?!\.)(?![0-9]+$)[A-Za-z0-9._-]{1,64}", re.ASCII)


@prepared
class Tag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`versions/tags/NAME.json`: a name of one version, which `digest` identifies.

    It never moves.
    """

    version: Annotated[int, msgspec.Meta(ge=1)]
    digest: str


def path(number: int) -> str:
    """The manifest of an older version."""
    return f"{FOLDER}{number}.json"


def tag_path(name: str) -> str:
    """The file of a tag."""
    return f"{TAGS}{name}.json"


def number_of(name: str) -> int | None:
    """The number of the version whose manifest has that path; None for another file."""
    match = _PATH.fullmatch(name)
    return int(match[1]) if match else None


def is_tag(name: str) -> bool:
    """Whether a tag can have that name: at most 64 ASCII letters, digits, `.`, `_` and `-`, and not
    a number.
    """
    return _TAG.fullmatch(name) is not None


def split_address(url: str) -> tuple[str, str] | None:
    """`gs://b/set@paper` as the address of the set and the tag or number of a version; None if it
    names none.
    """
    address, at, version = url.rpartition("@")
    return (
        (address, version)
        if at and address and (_NUMBER.fullmatch(version) or is_tag(version))
        else None
    )


def resolve(storage: Storage, version: str) -> tuple[int, str | None]:
    """The number that a tag or number means, and the digest of that version if a tag says it;
    raises ManifestError.
    """
    if _NUMBER.fullmatch(version):
        return int(version), None
    tag = read_tag(storage, version)
    if tag is None:
        raise MissingSet(
            f"{storage.url}: no version has the tag {version!r}; `shardset log"
            f" {storage.url}` lists the tags"
        )
    return tag.version, tag.digest


def read_tag(storage: Storage, name: str) -> Tag | None:
    """A tag; None if there is none of that name. Raises ManifestError if its file is damaged."""
    try:
        return msgspec.json.decode(storage.read(tag_path(name)), type=Tag)
    except NotFound:
        return None
    except JSON_ERRORS as error:
        raise ManifestError(
            f"{storage.url}/{tag_path(name)}: not a tag ({error}); remove it and tag the version"
            " again"
        ) from error


def tags(storage: Storage) -> dict[str, Tag]:
    """All tags by name."""
    names = [stat.name.removeprefix(TAGS).removesuffix(".json") for stat in storage.list(TAGS)]
    read = {name: read_tag(storage, name) for name in names if is_tag(name)}
    return {name: tag for name, tag in read.items() if tag}
