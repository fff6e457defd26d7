"""The manifest of a shard set: frozen records that refuse to be wrong, to and from JSON.

`docs/manifest.md` explains each field, `docs/manifest.schema.json` is the same for programs.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from shardset.errors import ManifestError, NotFound
from shardset.format import naming
from shardset.storage.base import Storage
from shardset.storage.open import open_file, open_storage

VERSION: Final = 1
KIND: Final = "shardset"

_NUMBERS = re.compile(rb"\[\n *[0-9]+(,\n *[0-9]+)*\n *\]")
_BREAK = re.compile(rb"\n *")
_ENTRY_BREAK = b"\n    "
_END_OF_ENTRIES = b"\n   "
_SPLITS = b',\n "splits": '
_PIECE = 1 << 18

Remainder = Literal["spread", "drop", "pad"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Crc32c = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9+/]{6}==$", max_length=8)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class ClassInfo(_Record, frozen=True, kw_only=True):
    """One class: its 0-based label, its name, and its WordNet id if it has one."""

    label: Count
    name: str
    wnid: str | None = None


class IndexFile(_Record, frozen=True, kw_only=True):
    """The index of a shard: path relative to the manifest, size, CRC32C (base64, as GCS reports it)."""

    path: str
    num_bytes: Count
    crc32c: Crc32c


class Shard(_Record, frozen=True, kw_only=True):
    """One tar. `first_id` is the id of its first sample in the split; `class_counts[label]` counts its samples."""

    path: str
    num_samples: Count
    num_bytes: Count
    crc32c: Crc32c
    sha256: Sha256
    first_id: Count
    index: IndexFile
    class_counts: list[Count]


class Split(_Record, frozen=True, kw_only=True):
    """All shards of one split, in id order. `fields` are all that occur, in the order of the index's columns."""

    num_samples: Count
    num_shards: Count
    num_source_samples: Count
    num_dropped: Count
    num_repeats: Count
    num_content_bytes: Count
    fields: list[str]
    shards: list[Shard]

    @property
    def mean_bytes(self) -> float:
        """Mean content bytes of a sample, over all its fields and without tar headers."""
        return self.num_content_bytes / max(1, self.num_samples)


class Quarantine(_Record, frozen=True, kw_only=True):
    """How many raw samples were rejected, and the file that lists them with their reasons."""

    count: Count
    path: str


class Provenance(_Record, frozen=True, kw_only=True):
    """Where the set comes from. Nothing here depends on when, where or on how many machines it was built."""

    tool: str
    source: str
    source_digest: Sha256
    options: dict[str, Any]
    libraries: dict[str, str]
    notes: list[str]


class Manifest(_Record, frozen=True, kw_only=True):
    """A shard set. Present means complete: it is written after everything it lists."""

    kind: Literal["shardset"]
    version: Literal[1]
    digest: Sha256
    plan_digest: Sha256
    seed: Count
    order_version: Count
    remainder: Remainder
    classes: list[ClassInfo]
    splits: dict[str, Split]
    quarantine: Quarantine
    fixes: dict[str, Count]
    provenance: Provenance

    def split(self, name: str) -> Split:
        """The split of that name; raises ManifestError naming those that exist."""
        if name not in self.splits:
            raise ManifestError(f"no split {name!r} in this shard set; it has {', '.join(sorted(self.splits))}")
        return self.splits[name]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The fields before the splits of a manifest that tell which set it is."""

    digest: Sha256
    plan_digest: Sha256
    quarantine: Quarantine


def seal(manifest: Manifest) -> Manifest:
    """The manifest with its digest filled in: the sha256 of its canonical JSON with an empty digest."""
    blank = msgspec.structs.replace(manifest, digest="")
    digest = hashlib.sha256(msgspec.json.encode(blank, order="sorted")).hexdigest()
    return msgspec.structs.replace(manifest, digest=digest)


def to_json(manifest: Manifest) -> bytes:
    """Canonical, readable JSON with a final newline; `parse` gives the same manifest back."""
    return _readable(msgspec.json.encode(manifest, order="sorted")) + b"\n"


def entry_of(shard: Shard) -> bytes:
    """A shard as one line of JSON, for `json_of_entries`."""
    return msgspec.json.encode(shard, order="sorted")


def json_of_entries(manifest: Manifest, entries: Callable[[str], Iterable[bytes]]) -> tuple[str, Iterator[bytes]]:
    """The digest, and `to_json` of the sealed manifest in pieces, for a manifest too large for memory.

    The splits of `manifest` list no shards; `entries` yields the shards of a split, at least one, as `entry_of` does.
    It is called twice for each split, because the digest covers the shards and precedes them.
    """
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
    """A checked Manifest from JSON; raises ManifestError with one sentence on what is wrong."""
    try:
        manifest = msgspec.convert(_decode(data, where), Manifest)
        check(manifest, where)
    except msgspec.ValidationError as error:
        raise ManifestError(f"{where}: {error}; restore or rebuild the shard set") from error
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
        data = storage.read(name)
        try:
            return LoadedSet(parse(data, target), storage)
        except ManifestError:
            again = storage.read(name)  # damage in transfer does not repeat
            if again == data:
                raise
    except NotFound as error:
        raise ManifestError(
            f"{target}: no manifest there, so no finished shard set; build one with `python -m pipelines build`"
        ) from error
    return LoadedSet(parse(again, target), storage)


def read_head(storage: Storage, name: str = naming.MANIFEST) -> Head:
    """The head of a manifest, without its shards, which may be too many for memory; checks nothing else.

    Raises NotFound, or ManifestError for anything but a manifest.
    """
    where, stat, data = f"{storage.url}/{name}", storage.stat(name), b""
    while _SPLITS not in data and len(data) < stat.num_bytes:
        stop = min(len(data) + _PIECE, stat.num_bytes)
        data += storage.read(name, len(data), stop, generation=stat.generation)
    before, mark, _ = data.partition(_SPLITS)
    if not mark:  # JSON in another layout than that of `to_json`
        return msgspec.convert(parse(data, where), Head, from_attributes=True)
    try:
        return msgspec.json.decode(before + b"}", type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{where}: not valid JSON ({error}); the file is damaged, restore or rebuild it") from error


def schema() -> dict[str, Any]:
    """The JSON Schema of a manifest. Only `check` compares records with each other (sums, digest)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Manifest)}


def check(manifest: Manifest, where: str = naming.MANIFEST) -> None:
    """Raises ManifestError unless counts add up, paths stay inside, labels are 0..n-1 and the digest fits."""
    for problem in _problems(manifest, where):
        raise ManifestError(f"{problem}; restore or rebuild the shard set")


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


def _decode(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object; raises ManifestError unless its kind and version are those of a manifest."""
    try:
        head = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{where}: not valid JSON ({error}); the file is damaged, restore or rebuild it") from error
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise ManifestError(f'{where}: not a shardset manifest: expected an object with "kind": "{KIND}"')
    version = head.get("version")
    if type(version) is not int or version < 1:
        raise ManifestError(f"{where}: version is {version!r}, expected a whole number from 1 to {VERSION}")
    if version > VERSION:
        raise ManifestError(
            f"{where}: version {version} is newer than this program reads (up to {VERSION}); upgrade shardset"
        )
    return head


def _problems(manifest: Manifest, where: str) -> Iterator[str]:
    num_classes = len(manifest.classes)
    if [info.label for info in manifest.classes] != list(range(num_classes)):
        yield f"{where}: class labels are not 0 to {num_classes - 1} in order"
    naming.check_relative(manifest.quarantine.path, where)
    for name, split in manifest.splits.items():
        if not naming.is_split(name):
            yield f"{where}: {name!r} can't name a split (letters, digits, - and _, not plan)"
        yield from _split_problems(split, num_classes, f"{where}: split {name!r}")
        yield from _size_problems(split, manifest.remainder, f"{where}: split {name!r}")
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    for path, count in Counter(path for shard in shards for path in (shard.path, shard.index.path)).items():
        if count > 1:
            yield f"{where}: path {path!r} is listed twice"
    if seal(manifest).digest != manifest.digest:
        yield f"{where}: the content does not fit its digest {manifest.digest[:12]}…"


def _split_problems(split: Split, num_classes: int, where: str) -> Iterator[str]:
    if split.num_shards != len(split.shards) or not split.shards:
        yield f"{where}: num_shards is {split.num_shards} but {len(split.shards)} are listed"
    is_unique = len(set(split.fields)) == len(split.fields) > 0
    if not is_unique or not all(map(naming.is_field, split.fields)):
        yield f"{where}: fields {split.fields} can't be those of a sample"
    first_id = 0
    for shard in split.shards:
        yield from _shard_problems(shard, first_id, num_classes, f"{where}: shard {shard.path!r}")
        first_id += shard.num_samples
    if first_id != split.num_samples:
        yield f"{where}: num_samples is {split.num_samples} but its shards hold {first_id}"


def _size_problems(split: Split, remainder: Remainder, where: str) -> Iterator[str]:
    expected = split.num_source_samples - split.num_dropped + split.num_repeats
    if split.num_samples != expected:
        terms = (
            f"{split.num_source_samples} source samples, {split.num_dropped} dropped and {split.num_repeats} repeats"
        )
        yield f"{where}: {terms} make {expected}, but num_samples is {split.num_samples}"
    sizes = {shard.num_samples for shard in split.shards}
    most_apart, allowed = (1, "at most one apart") if remainder == "spread" else (0, "all equal")
    if max(sizes) - min(sizes) > most_apart:
        sentence = f"shards hold {min(sizes)} to {max(sizes)} samples, expected sizes {allowed}"
        yield f"{where}: {sentence} with remainder {remainder!r}"


def _shard_problems(shard: Shard, first_id: int, num_classes: int, where: str) -> Iterator[str]:
    naming.check_relative(shard.path, where)
    naming.check_relative(shard.index.path, where)
    if shard.num_samples < 1 or shard.num_bytes < 1 or shard.index.num_bytes < 1:
        yield f"{where}: num_samples and num_bytes must be positive"
    if shard.first_id != first_id:
        yield f"{where}: first_id is {shard.first_id}, expected {first_id} from the shards before it"
    if len(shard.class_counts) != num_classes:
        yield f"{where}: {len(shard.class_counts)} class counts for {num_classes} classes"
    num_counted = sum(shard.class_counts)
    if num_counted > shard.num_samples:
        yield f"{where}: class counts add up to {num_counted}, but it holds {shard.num_samples} samples"
