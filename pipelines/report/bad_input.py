"""Raw samples that a build rejected or put right, with pictures where there are any."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pipelines.check import quarantine
from pipelines.check.lookups import read_fixes
from pipelines.report.catalog import Catalog, Damage
from pipelines.report.thumbnails import picture, thumbnail
from shardset.errors import ConfigError, DamagedShard, StorageError, UndecodableImage
from shardset.format.manifest import Manifest
from shardset.html import page
from shardset.html.page import Picture
from shardset.storage.base import Storage
from shardset.storage.open import is_absolute

MAX_RAW_BYTES = 64 * 2**20
"""Larger quarantined files are not read for their picture."""

_JPEG_END = b"\xff\xd9"


@dataclass(frozen=True, slots=True)
class FixedSample:
    """A sample that was put right: its number in the catalog, how, and its original name."""

    sample: int
    fix: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedSample:
    """One line of the quarantine list, with a picture where one could be made."""

    name: str
    split: str
    reason: str
    where: str
    picture: Picture | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedSamples:
    """The first rejected samples, and (split, reason, number) of all, the most frequent first."""

    first: list[RejectedSample]
    reasons: list[tuple[str, str, int]]


def read_fixed(
    storage: Storage, manifest: Manifest, catalog: Catalog, max_samples: int
) -> tuple[list[FixedSample], list[Damage]]:
    """Some fixed samples, as far as the plan is there to tell."""
    firsts = {
        (shard.split, shard.number): int(first)
        for shard, first in zip(catalog.shards, catalog.first_samples, strict=False)
    }
    shards = [(shard.split, shard.number, shard.index["key"]) for shard in catalog.shards]
    try:
        fixes = read_fixes(storage, manifest, shards, max_samples)
    except (DamagedShard, StorageError) as error:
        return [], [Damage("plan", str(error))]
    return [FixedSample(firsts[split, number] + row, fix, name) for split, number, row, fix, name in fixes], []


def read_rejected(
    storage: Storage, manifest: Manifest, raw: Storage | None, max_samples: int
) -> tuple[RejectedSamples, list[Damage]]:
    """The quarantine list, and what is wrong with it; pictures come from `raw`, the folder of the raw input."""
    path = manifest.quarantine.path
    try:
        lines = quarantine.read(storage, manifest.quarantine) if manifest.quarantine.count else []
    except StorageError as error:
        return RejectedSamples(first=[], reasons=[]), [Damage(path, f"can't be read: {error}")]
    entries = [entry for entry in lines if entry is not None]
    damage = [
        Damage(path, f"line {number} is not a JSON object; restore or rebuild it")
        for number, entry in enumerate(lines, 1)
        if entry is None
    ]
    counts = Counter((str(entry.get("split", "")), str(entry.get("reason", ""))) for entry in entries)
    ranked = sorted(counts.items(), key=lambda counted: (-counted[1], counted[0]))
    rejected = RejectedSamples(
        first=[_rejected(entry, raw) for entry in entries[:max_samples]],
        reasons=[(split, reason, number) for (split, reason), number in ranked],
    )
    return rejected, damage


def _rejected(entry: dict[str, Any], raw: Storage | None) -> RejectedSample:
    """An entry of a list that may be damaged: any field may have any type."""
    name, offset, num_bytes = entry.get("object"), entry.get("offset"), entry.get("num_bytes")
    where, shown = "", None
    if isinstance(name, str) and all(isinstance(number, int) and number >= 0 for number in (offset, num_bytes)):
        where = f"{name} at byte {offset}, {page.size(num_bytes or 0)}"
        shown = _picture_of(name, offset or 0, num_bytes or 0, raw) if raw else None
    return RejectedSample(
        name=str(entry.get("name", "")),
        split=str(entry.get("split", "")),
        reason=str(entry.get("reason", "")),
        where=where,
        picture=shown,
    )


def _picture_of(name: str, start: int, num_bytes: int, raw: Storage) -> Picture | None:
    """A picture of a rejected image, if any can be made; a truncated JPEG is shown as far as it goes."""
    if is_absolute(name) or num_bytes > MAX_RAW_BYTES:
        return None
    try:
        data = raw.read(name, start, start + num_bytes)
    except (StorageError, ConfigError):
        return None  # the raw input may be gone: the list is what counts
    for attempt in (data, data + _JPEG_END):
        try:
            return picture(thumbnail(attempt))
        except UndecodableImage:
            continue
    return None
