"""The manifest of a shard set, to and from JSON.

`docs/manifest.md` explains each field, `docs/manifest.schema.json` is the same for programs.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from shardset.errors import ManifestError, NotFound
from shardset.format import naming, records
from shardset.format.records import VERSION as VERSION
from shardset.format.records import ClassInfo as ClassInfo
from shardset.format.records import Manifest as Manifest
from shardset.format.records import Provenance as Provenance
from shardset.format.records import Quarantine as Quarantine
from shardset.format.records import Split as Split
from shardset.format.shards import IndexFile as IndexFile
from shardset.format.shards import Shard as Shard
from shardset.format.shards import StoredShards
from shardset.prepared import prepared
from shardset.storage.base import Storage
from shardset.storage.open import open_file, open_storage

KIND: Final = "shardset"

_NUMBERS = re.compile(rb"\[\n *[0-9]+(,\n *[0-9]+)*\n *\]")
_BREAK = re.compile(rb"\n *")


@prepared
class _Version(msgspec.Struct):
    kind: Any = None
    version: Any = None


def seal(manifest: Manifest) -> Manifest:
    """The manifest with its digest filled in: the sha256 of its canonical JSON with an empty digest."""
    blank = msgspec.structs.replace(manifest, digest="")
    digest = hashlib.sha256(_encode(blank)).hexdigest()
    return msgspec.structs.replace(manifest, digest=digest)


def to_json(manifest: Manifest) -> bytes:
    """Canonical, readable JSON with a final newline; `parse` gives the same manifest back."""
    text = msgspec.json.format(_encode(manifest), indent=1)
    # A line for each of thousands of class totals would be most of the file. No string holds a newline.
    lists = _NUMBERS.sub(lambda match: _BREAK.sub(b" ", match[0]).replace(b"[ ", b"[").replace(b" ]", b"]"), text)
    return lists + b"\n"


def parse(data: bytes, where: str = naming.MANIFEST) -> Manifest:
    """A checked Manifest from JSON; raises ManifestError with one sentence on what is wrong.

    Its shards can be read only once it is `opened`.
    """
    try:
        _check_version(data, where)
        manifest = msgspec.json.decode(data, type=Manifest)
        check(manifest, where)
    except msgspec.ValidationError as error:
        raise ManifestError(f"{where}: {error}; restore or rebuild the shard set") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{where}: not valid JSON ({error}); the file is damaged, restore or rebuild it") from error
    except RecursionError as error:
        raise ManifestError(f"{where}: nested too deeply for a manifest; restore or rebuild it") from error
    return manifest


class LoadedSet(NamedTuple):
    """A manifest and the storage that its paths are relative to: read once and handed on."""

    manifest: Manifest
    storage: Storage


def load(url: str) -> LoadedSet:
    """The manifest at `url` (the file or its folder) and the storage that its paths are relative to."""
    storage, name = open_file(url) if url.endswith(".json") else (open_storage(url), naming.MANIFEST)
    target = url if url.endswith(".json") else f"{url.rstrip('/')}/{name}"
    try:
        return LoadedSet(read(storage, name, target), storage)
    except NotFound as error:
        raise ManifestError(
            f"{target}: no manifest there, so no finished shard set; build one with `python -m pipelines build`"
        ) from error


def read(storage: Storage, name: str = naming.MANIFEST, where: str | None = None) -> Manifest:
    """The manifest of that name, with its shards; raises NotFound, or ManifestError for damage that two reads found."""
    return opened(storage, read_head(storage, name, where))


def read_head(storage: Storage, name: str = naming.MANIFEST, where: str | None = None) -> Manifest:
    """The manifest of that name, as `parse` returns it: no table of shards is read. Raises as `read` does."""
    where = where or f"{storage.url}/{name}"
    data = storage.read(name)
    try:
        return parse(data, where)
    except ManifestError:
        again = storage.read(name)  # damage in transfer does not repeat
        if again == data:
            raise
        return parse(again, where)


def opened(storage: Storage, manifest: Manifest) -> Manifest:
    """A parsed manifest with its shards. Reads the tables of unequal shards; raises ManifestError."""
    splits = {
        name: msgspec.structs.replace(split, shards=StoredShards(storage, split.groups))
        for name, split in manifest.splits.items()
    }
    return msgspec.structs.replace(manifest, splits=splits)


def files_of(manifest: Manifest) -> Iterator[str]:
    """The paths of all files that a manifest names; reads none."""
    yield manifest.quarantine.path
    for split in manifest.splits.values():
        for group in split.groups:
            yield group.table
            for number in range(group.num_shards):
                path = group.path(number)
                yield from (path, naming.index_path(path))


def schema() -> dict[str, Any]:
    """The JSON Schema of a manifest. Only `check` compares records with each other (sums, digest)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Manifest)}


def check(manifest: Manifest, where: str = naming.MANIFEST) -> None:
    """Raises ManifestError unless counts add up, paths stay inside, labels are 0..n-1 and the digest fits."""
    for problem in records.problems(manifest, where):
        raise ManifestError(f"{problem}; restore or rebuild the shard set")
    if seal(manifest).digest != manifest.digest:
        raise ManifestError(
            f"{where}: the content does not fit its digest {manifest.digest[:12]}…; restore or rebuild the shard set"
        )


def _encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest, order="sorted", enc_hook=_groups_in_file)


def _groups_in_file(value: object) -> Any:
    """What the file holds for the shards of an opened manifest."""
    assert isinstance(value, StoredShards)
    return value.groups


def _check_version(data: bytes, where: str) -> None:
    """Raises ManifestError unless the kind and the version are those of a manifest."""
    try:
        head = msgspec.json.decode(data, type=_Version)
    except msgspec.ValidationError:
        msgspec.json.decode(data)  # no object: is it JSON at all?
        head = _Version()
    if head.kind != KIND:
        raise ManifestError(f'{where}: not a shardset manifest: expected an object with "kind": "{KIND}"')
    version = head.version
    if type(version) is not int or version < 1:
        raise ManifestError(f"{where}: version is {version!r}, expected {VERSION}")
    if version > VERSION:
        raise ManifestError(
            f"{where}: version {version} is newer than this program reads (up to {VERSION}); upgrade shardset"
        )
