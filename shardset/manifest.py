"""The manifest of a shard set: frozen records that refuse to be wrong, to and from JSON.

`docs/manifest.md` explains each field, `docs/manifest.schema.json` is the same for programs.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from shardset import naming
from shardset.errors import ManifestError, NotFound
from shardset.storage import Storage, open_file

VERSION = 1
KIND = "shardset"

Remainder = Literal["spread", "drop", "pad"]


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class ClassInfo(_Record, frozen=True, kw_only=True):
    """One class: its 0-based label, its name, and its WordNet id if it has one."""

    label: int
    name: str
    wnid: str | None = None


class IndexFile(_Record, frozen=True, kw_only=True):
    """The index of a shard: path relative to the manifest, size, CRC32C (base64, as GCS reports it)."""

    path: str
    num_bytes: int
    crc32c: str


class Shard(_Record, frozen=True, kw_only=True):
    """One tar. `first_id` is the id of its first sample in the split; `class_counts[label]` counts its samples."""

    path: str
    num_samples: int
    num_bytes: int
    crc32c: str
    sha256: str
    first_id: int
    index: IndexFile
    class_counts: list[int]


class Split(_Record, frozen=True, kw_only=True):
    """All shards of one split, in id order. `fields` in the order in which a sample's members stand."""

    num_samples: int
    num_shards: int
    num_source_samples: int
    num_dropped: int
    num_repeats: int
    num_content_bytes: int
    fields: list[str]
    shards: list[Shard]

    @property
    def mean_bytes(self) -> float:
        """Mean content bytes of a sample, over all its fields and without tar headers."""
        return self.num_content_bytes / max(1, self.num_samples)


class Quarantine(_Record, frozen=True, kw_only=True):
    """How many raw samples were rejected, and the file that lists them with their reasons."""

    count: int
    path: str


class Provenance(_Record, frozen=True, kw_only=True):
    """Where the set comes from. Nothing here depends on when, where or on how many machines it was built."""

    tool: str
    source: str
    source_digest: str
    options: dict[str, Any]
    libraries: dict[str, str]
    notes: list[str]


class Manifest(_Record, frozen=True, kw_only=True):
    """A shard set. Present means complete: it is written after everything it lists."""

    kind: str
    version: int
    digest: str
    plan_digest: str
    seed: int
    order_version: int
    remainder: Remainder
    classes: list[ClassInfo]
    splits: dict[str, Split]
    quarantine: Quarantine
    fixes: dict[str, int]
    provenance: Provenance

    def split(self, name: str) -> Split:
        """The split of that name; raises ManifestError naming those that exist."""
        if name not in self.splits:
            raise ManifestError(f"no split {name!r} in this shard set; it has {', '.join(sorted(self.splits))}")
        return self.splits[name]


def seal(manifest: Manifest) -> Manifest:
    """The manifest with its digest filled in: the sha256 of its canonical JSON with an empty digest."""
    blank = msgspec.structs.replace(manifest, digest="")
    digest = hashlib.sha256(msgspec.json.encode(blank, order="sorted")).hexdigest()
    return msgspec.structs.replace(manifest, digest=digest)


def to_json(manifest: Manifest) -> bytes:
    """Canonical, readable JSON with a final newline; `parse` gives the same manifest back."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def parse(data: bytes, where: str = naming.MANIFEST) -> Manifest:
    """A checked Manifest from JSON; raises ManifestError, one sentence for each way to be wrong."""
    try:
        head = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{where}: not valid JSON ({error}); the file is damaged, restore or rebuild it") from error
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise ManifestError(f'{where}: not a shardset manifest: expected an object with "kind": "{KIND}"')
    version = head.get("version")
    if not isinstance(version, int) or version < 1:
        raise ManifestError(f"{where}: version is {version!r}, expected a whole number from 1 to {VERSION}")
    if version > VERSION:
        raise ManifestError(
            f"{where}: version {version} is newer than this program reads (up to {VERSION}); upgrade shardset"
        )
    try:
        manifest = msgspec.convert(head, Manifest)
    except msgspec.ValidationError as error:
        raise ManifestError(f"{where}: {error}; restore or rebuild the shard set") from error
    check(manifest, where)
    return manifest


def load(url: str) -> tuple[Manifest, Storage]:
    """The manifest at `url` (the file or its folder) and the storage that its paths are relative to."""
    target = url if url.endswith(".json") else url.rstrip("/") + "/" + naming.MANIFEST
    storage, name = open_file(target)
    try:
        data = storage.read(name)
    except NotFound as error:
        raise ManifestError(
            f"{target}: no manifest there, so no finished shard set; build one with `python -m pipelines build`"
        ) from error
    return parse(data, target), storage


def schema() -> dict[str, Any]:
    """The JSON Schema of a manifest."""
    return msgspec.json.schema(Manifest)


def check(manifest: Manifest, where: str = naming.MANIFEST) -> None:
    """Raises ManifestError unless counts add up, paths stay inside, labels are 0..n-1 and the digest fits."""
    if [info.label for info in manifest.classes] != list(range(len(manifest.classes))):
        raise ManifestError(f"{where}: class labels are not 0 to {len(manifest.classes) - 1} in order; rebuild the set")
    naming.check_relative(manifest.quarantine.path, where)
    for name, split in manifest.splits.items():
        _check_split(split, len(manifest.classes), f"{where}: split {name!r}")
    _refuse_twins((shard.path for split in manifest.splits.values() for shard in split.shards), where)
    if seal(manifest).digest != manifest.digest:
        raise ManifestError(f"{where}: the content does not fit its digest {manifest.digest[:12]}…; restore it")


def _check_split(split: Split, num_classes: int, where: str) -> None:
    if split.num_shards != len(split.shards):
        raise ManifestError(f"{where}: num_shards is {split.num_shards} but {len(split.shards)} are listed; rebuild it")
    first_id = 0
    for shard in split.shards:
        _check_shard(shard, first_id, num_classes, where)
        first_id += shard.num_samples
    if first_id != split.num_samples:
        raise ManifestError(f"{where}: num_samples is {split.num_samples} but its shards hold {first_id}; rebuild it")
    sizes = sorted({shard.num_samples for shard in split.shards})
    if len(sizes) > 1 and sizes[-1] - sizes[0] > 1:
        raise ManifestError(f"{where}: shards hold {sizes[0]} to {sizes[-1]} samples, expected sizes at most one apart")


def _check_shard(shard: Shard, first_id: int, num_classes: int, where: str) -> None:
    where = f"{where}: shard {shard.path!r}"
    naming.check_relative(shard.path, where)
    naming.check_relative(shard.index.path, where)
    if shard.num_samples < 1 or shard.num_bytes < 1 or shard.index.num_bytes < 1:
        raise ManifestError(f"{where}: num_samples and num_bytes must be positive; rebuild the set")
    if shard.first_id != first_id:
        raise ManifestError(f"{where}: first_id is {shard.first_id}, expected {first_id} from the shards before it")
    if len(shard.class_counts) != num_classes:
        raise ManifestError(f"{where}: {len(shard.class_counts)} class counts for {num_classes} classes; rebuild it")
    if num_classes and sum(shard.class_counts) != shard.num_samples:
        raise ManifestError(
            f"{where}: class counts add up to {sum(shard.class_counts)}, expected {shard.num_samples}; rebuild the set"
        )


def _refuse_twins(paths: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ManifestError(f"{where}: shard {path!r} is listed twice; rebuild the set")
        seen.add(path)
