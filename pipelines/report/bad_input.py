"""Raw samples that a build rejected or fixed, with pictures where possible."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pipelines.check import quarantine
from pipelines.check.problems import Problem
from pipelines.images.check import fixes_of
from pipelines.report.catalog import Catalog
from pipelines.report.thumbnails import picture, thumbnail
from shardset.errors import ConfigError, DamagedShard, StorageError, UndecodableImage
from shardset.format.manifest import Manifest
from shardset.format.originals import read_origins
from shardset.html import page
from shardset.html.page import Picture
from shardset.storage.base import Storage
from shardset.storage.open import is_absolute

MAX_RAW_BYTES = 64 * 2**20
"""Quarantined files above this size are shown without a picture."""

_JPEG_END = b"\xff\xd9"


@dataclass(frozen=True, slots=True)
class FixedSample:
    """A fixed sample: its number in the catalog, the fix, and its original name."""

    sample: int
    fix: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedSample:
    """One line of the quarantine list, with a picture if it decodes."""

    name: str
    split: str
    reason: str
    where: str
    picture: Picture | None


def read_fixed(
    storage: Storage, manifest: Manifest, catalog: Catalog, max_samples: int
) -> tuple[list[FixedSample], list[Problem]]:
    """Up to `max_samples` fixed samples, if the plan still exists; reads no more of it than needed."""
    fixed: list[FixedSample] = []
    shards = zip(catalog.shards, catalog.first_samples.tolist(), strict=False)
    for shard, first in shards if manifest.fixes else []:
        try:
            origins = read_origins(storage, shard.split, shard.number, shard.index["key"]) or []
        except (DamagedShard, StorageError) as error:
            return [], [Problem("plan", str(error))]
        fixes = ((first + row, ", ".join(fixes_of(origin.fix)), origin.name) for row, origin in enumerate(origins))
        fixed += [FixedSample(sample, fix, name) for sample, fix, name in fixes if fix]
        if len(fixed) >= max_samples:
            break
    return fixed[:max_samples], []


def read_rejected(
    storage: Storage, manifest: Manifest, raw: Storage | None, max_samples: int
) -> tuple[list[RejectedSample], list[tuple[str, str, int]], list[Problem]]:
    """The first rejected samples; (split, reason, number) of all, most frequent first; the problems of the list.

    Pictures come from `raw`, the folder of the raw input.
    """
    listed = manifest.quarantine
    entries, damage = quarantine.check(storage, listed) if listed.count else ([], [])
    counts = Counter((str(entry.get("split", "")), str(entry.get("reason", ""))) for entry in entries)
    ranked = sorted(counts.items(), key=lambda counted: (-counted[1], counted[0]))
    reasons = [(split, reason, number) for (split, reason), number in ranked]
    return [_rejected(entry, raw) for entry in entries[:max_samples]], reasons, damage


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
    """A picture of a rejected image, if it decodes; a truncated JPEG is shown as far as it goes."""
    if is_absolute(name) or num_bytes > MAX_RAW_BYTES:
        return None
    try:
        data = raw.read(name, start, start + num_bytes)
    except (StorageError, ConfigError):
        return None  # the raw input may be gone: the report does without its pictures
    # With an end marker, the decoder accepts a truncated JPEG.
    for attempt in (data, data + _JPEG_END):
        try:
            return picture(thumbnail(attempt))
        except UndecodableImage:
            continue
    return None
