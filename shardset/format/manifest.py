"""The manifest of a shard set, to and from JSON.

`docs/manifest.md` explains each field, `docs/manifest.schema.json` is the same for programs.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from shardset.errors import ManifestError, NotFound
from shardset.format import naming, records
from shardset.format.records import LISTED as LISTED
from shardset.format.records import PAGED as PAGED
from shardset.format.records import VERSION as VERSION
from shardset.format.records import ClassInfo as ClassInfo
from shardset.format.records import Manifest as Manifest
from shardset.format.records import Provenance as Provenance
from shardset.format.records import Quarantine as Quarantine
from shardset.format.records import Remainder as Remainder
from shardset.format.records import Split as Split
from shardset.format.shards import IndexFile as IndexFile
from shardset.format.shards import PagedShards, Sha256, ShardPages, pages_of
from shardset.format.shards import Shard as Shard
from shardset.prepared import prepared
from shardset.storage.base import Stat, Storage
from shardset.storage.checked import read_same_twice
from shardset.storage.open import open_file, open_storage

KIND: Final = "shardset"

_NUMBERS = re.compile(rb"\[\n *[0-9]+(,\n *[0-9]+)*\n *\]")
_BREAK = re.compile(rb"\n *")
_ENTRY_BREAK = b"\n    "
_END_OF_ENTRIES = b"\n   "
_SPLITS = b',\n "splits": '
_PIECE = 1 << 18


@prepared
class _Version(msgspec.Struct):
    kind: Any = None
    version: Any = None


@prepared
class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The fields before the splits of a manifest that tell which set it is."""

    digest: Sha256
    plan_digest: Sha256
    quarantine: Quarantine


def seal(manifest: Manifest) -> Manifest:
    """The manifest with its digest filled in: the sha256 of its canonical JSON with an empty digest."""
    blank = msgspec.structs.replace(manifest, digest="")
    digest = hashlib.sha256(_encode(blank)).hexdigest()
    return msgspec.structs.replace(manifest, digest=digest)


def to_json(manifest: Manifest) -> bytes:
    """Canonical, readable JSON with a final newline; `parse` gives the same manifest back."""
    return _readable(_encode(manifest)) + b"\n"


def entry_of(shard: Shard) -> bytes:
    """A shard as one line of JSON, for `json_of_entries`."""
    return msgspec.json.encode(shard, order="sorted")


def json_of_entries(manifest: Manifest, entries: Callable[[str], Iterable[bytes]]) -> tuple[str, Iterator[bytes]]:
    """The digest, and `to_json` of the sealed manifest in pieces, for a manifest too large for memory.

    The splits of `manifest` list no shards; `entries` yields the shards of a split, at least one, as `entry_of` does.
    It is called twice for each split, because the digest covers the shards and precedes them.
    """
    assert manifest.version == LISTED
    assert not any(split.shards for split in manifest.splits.values())
    splits = sorted(manifest.splits)
    blank = msgspec.json.encode(msgspec.structs.replace(manifest, digest=""), order="sorted")
    hasher = hashlib.sha256()
    for piece in _filled(blank, b'"shards":[]', [entries(split) for split in splits], b"", b""):
        hasher.update(piece)
    digest = hasher.hexdigest()
    sealed = to_json(msgspec.structs.replace(manifest, digest=digest))
    readable = [(_readable(entry).replace(b"\n", _ENTRY_BREAK) for entry in entries(split)) for split in splits]
    return digest, _filled(sealed, b'"shards": []', readable, _ENTRY_BREAK, _END_OF_ENTRIES)


def parse(data: bytes, where: str = naming.MANIFEST) -> Manifest:
    """A checked Manifest from JSON; raises ManifestError with one sentence on what is wrong.

    In version 2 `shards` are still ShardPages, which only `opened` turns into shards.
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
    where = where or f"{storage.url}/{name}"
    data = storage.read(name)
    try:
        manifest = parse(data, where)
    except ManifestError:
        again = storage.read(name)  # damage in transfer does not repeat
        if again == data:
            raise
        manifest = parse(again, where)
    return opened(storage, manifest, where)


def opened(storage: Storage, manifest: Manifest, where: str) -> Manifest:
    """A parsed manifest with its shards, for which version 2 reads their pages; raises ManifestError."""
    if manifest.version == LISTED:
        return manifest
    splits = {name: _opened(storage, name, split) for name, split in manifest.splits.items()}
    found = msgspec.structs.replace(manifest, splits=splits)
    for problem in records.problems_in_pages(found, where):
        raise ManifestError(f"{problem}; restore or rebuild the shard set")
    return found


def num_bytes(manifest: Manifest) -> int:
    """The bytes that a reader fetches to know the shards: the manifest and, in version 2, pages."""
    pages = [page for split in manifest.splits.values() if (found := pages_of(split.shards)) for page in found.pages]
    return len(to_json(manifest)) + sum(page.num_bytes for page in pages)


def files_of(manifest: Manifest) -> Iterator[str]:
    """The paths of all files that a manifest lists; of version 2 no page is read."""
    yield manifest.quarantine.path
    for name, split in manifest.splits.items():
        pages = pages_of(split.shards)
        if pages is None:
            yield from (path for shard in split.shards for path in (shard.path, shard.index.path))
            continue
        yield from (page.path for page in pages.files)
        for number in range(split.num_shards):
            path = naming.shard_path(pages.folder, name, number)
            yield from (path, naming.index_path(path))


def read_head(storage: Storage, name: str = naming.MANIFEST) -> Head:
    """The head of a manifest, without its shards, which may be too many for memory; checks nothing else.

    Raises NotFound, or ManifestError for anything but a manifest.
    """
    where, stat, data = f"{storage.url}/{name}", storage.stat(name), b""
    while _SPLITS not in data and len(data) < stat.num_bytes:
        data += _piece(storage, stat, len(data))
    before, mark, _ = data.partition(_SPLITS)
    if not mark:  # JSON in another layout than that of `to_json`
        return msgspec.convert(parse(data, where), Head, from_attributes=True)
    try:
        return msgspec.json.decode(before + b"}", type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{where}: not valid JSON ({error}); the file is damaged, restore or rebuild it") from error


def _piece(storage: Storage, stat: Stat, start: int) -> bytes:
    """The next piece of a manifest: all of a short one, which a bucket compares with its checksum, else read twice."""
    read = partial(storage.read, stat.name, start, min(start + _PIECE, stat.num_bytes), generation=stat.generation)
    return read() if stat.num_bytes <= _PIECE else read_same_twice(read, f"{storage.url}/{stat.name}")


def schema() -> dict[str, Any]:
    """The JSON Schema of a manifest. Only `check` compares records with each other (sums, digest)."""
    kinds = {
        "if": {"properties": {"version": {"const": LISTED}}},
        "then": _shards_of("array"),
        "else": _shards_of("object"),
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Manifest), **kinds}


def check(manifest: Manifest, where: str = naming.MANIFEST) -> None:
    """Raises ManifestError unless counts add up, paths stay inside, labels are 0..n-1 and the digest fits."""
    for problem in records.problems(manifest, where):
        raise ManifestError(f"{problem}; restore or rebuild the shard set")
    if seal(manifest).digest != manifest.digest:
        raise ManifestError(
            f"{where}: the content does not fit its digest {manifest.digest[:12]}…; restore or rebuild the shard set"
        )


def _readable(data: bytes) -> bytes:
    text = msgspec.json.format(data, indent=1)
    # A thousand shards of a thousand classes would be a million lines. No string holds a newline, so none is touched.
    return _NUMBERS.sub(lambda match: _BREAK.sub(b" ", match[0]).replace(b"[ ", b"[").replace(b" ]", b"]"), text)


def _filled(
    text: bytes, empty: bytes, lists: Sequence[Iterable[bytes]], before_each: bytes, at_end: bytes
) -> Iterator[bytes]:
    """`text` with its last empty lists of shards filled; no other empty list follows the splits."""
    start, *rest = text.rsplit(empty, len(lists))
    yield start
    for entries, after in zip(lists, rest, strict=True):
        yield empty[:-1]
        for number, entry in enumerate(entries):
            yield (b"," if number else b"") + before_each + entry
        yield at_end + b"]" + after


def _encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest, order="sorted", enc_hook=_pages_in_file)


def _pages_in_file(value: object) -> ShardPages:
    """What stands in the file for the shards of version 2."""
    assert isinstance(value, PagedShards)
    return value.pages


def _opened(storage: Storage, name: str, split: Split) -> Split:
    pages = pages_of(split.shards)
    assert pages is not None
    return msgspec.structs.replace(split, shards=PagedShards(storage, name, split.num_shards, pages))


def _shards_of(kind: str) -> dict[str, Any]:
    split = {"properties": {"shards": {"type": kind}}}
    return {"properties": {"splits": {"additionalProperties": split}}}


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
        raise ManifestError(f"{where}: version is {version!r}, expected a whole number from 1 to {VERSION}")
    if version > VERSION:
        raise ManifestError(
            f"{where}: version {version} is newer than this program reads (up to {VERSION}); upgrade shardset"
        )
