"""Gathers what the report of a shard set shows: looks at its images, finds duplicates, makes thumbnails.

Everything is bounded and chosen by the set alone, so that the same set and limits give the same report.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.check import quarantine
from pipelines.check.inspect import read_fixes
from pipelines.images.encode import UndecodableImage, thumbnail_of
from pipelines.report import near_duplicates
from pipelines.report import samples as looking
from pipelines.report.samples import Catalog, Damage, image_of
from shardset.errors import ConfigError, DamagedShard, StorageError
from shardset.format.manifest import Manifest
from shardset.html import page
from shardset.html.page import Picture
from shardset.storage.base import Storage
from shardset.storage.open import is_absolute

MAX_THUMBNAIL_BYTES = 2 * 2**20
"""Thumbnails beyond this are left out."""

CLASS_THUMBNAILS = 480
SHARD_THUMBNAILS = 240
EACH = 12
"""Of a class or a shard at most so many; many classes get fewer each."""

MAX_SHOWN = 24
"""Of groups of duplicates, pairs, quarantined and fixed samples."""

MAX_CONFIRMED = 400
"""Groups of equal size and CRC32C that are compared byte for byte; of more, the rest are taken at their word."""

MAX_RAW_BYTES = 64 * 2**20
"""Of quarantined files, larger ones are not read for their picture."""

THUMBNAIL = 96
LOSSLESS_PIXELS = 1024

_GREY_FROM = 36


@dataclass(frozen=True, slots=True)
class ImageStats:
    """What is kept of a decoded image: width and height in pixels as stored, mode, and a small grey version.

    `flat`: on white its small version is nearly one colour.
    """

    width: int
    height: int
    mode: str
    grey: bytes
    transparent: bool
    flat: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateGroup:
    """Samples with the same content: `samples` are numbers of the catalog; `confirmed` if compared byte for byte."""

    samples: tuple[int, ...]
    splits: int
    labels: int
    confirmed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedSamples:
    """One line of the quarantine list with a picture of it, where one could be made."""

    name: str
    split: str
    reason: str
    where: str
    picture: Picture | None


@dataclass(frozen=True, kw_only=True)
class SetReport:
    """Everything that the page says beyond the manifest; samples are numbers of the catalog."""

    manifest: Manifest
    catalog: Catalog
    num_looked: int
    looks: dict[int, ImageStats]
    groups: list[DuplicateGroup]
    pairs: list[tuple[int, int, int, float]]
    by_class: dict[int, list[int]]
    by_shard: dict[int, list[int]]
    fixed: list[tuple[int, str, str]]
    rejected: list[RejectedSamples]
    reasons: list[tuple[str, str, int]]
    pictures: dict[int, Picture]
    num_left_out: int
    damage: list[Damage]


def gather(manifest: Manifest, storage: Storage, *, max_images: int, raw: Storage | None = None) -> SetReport:
    """Looks into a set: all indexes, up to `max_images` images, and what is shown of them."""
    catalog, damage = looking.open_catalog(storage, manifest)
    chosen = looking.choose(catalog, max_images)
    looks, wrong = looking.read_each(storage, catalog, chosen, _look)
    damage += wrong
    groups, wrong = _twins(storage, catalog)
    damage += wrong
    pairs = _pairs(catalog, looks)
    fixed, wrong = _fixed(storage, manifest, catalog)
    damage += wrong
    by_class = _by_class(catalog, len(manifest.classes))
    by_shard = _by_shard(catalog)
    shown = _in_order_of_worth(groups, pairs, fixed, by_class, by_shard)
    thumbnails, wrong = looking.read_each(storage, catalog, np.array(shown, np.int64), _thumbnail)
    damage += wrong
    rejected, reasons, wrong = _quarantine(manifest, storage, raw)
    pictures, left_out = _within_budget({sample: thumbnails[sample] for sample in shown if sample in thumbnails})
    return SetReport(
        manifest=manifest,
        catalog=catalog,
        num_looked=len(chosen),
        looks=looks,
        groups=groups,
        pairs=pairs,
        by_class=by_class,
        by_shard=by_shard,
        fixed=fixed,
        rejected=rejected,
        reasons=reasons,
        pictures=pictures,
        num_left_out=left_out,
        damage=list(dict.fromkeys([*damage, *wrong])),
    )


def _look(contents: dict[str, bytes]) -> ImageStats:
    small = thumbnail_of(image_of(contents), _GREY_FROM)
    grey = small.pixels.convert("L").resize((near_duplicates.GREY_WIDTH, near_duplicates.GREY_HEIGHT))
    flat = bool(np.ptp(np.asarray(small.pixels), axis=(0, 1)).max() < near_duplicates.MIN_CONTRAST)
    return ImageStats(small.width, small.height, small.pixels.mode, grey.tobytes(), small.transparent, flat)


def _thumbnail(contents: dict[str, bytes]) -> tuple[bytes, int, int]:
    return thumbnail(image_of(contents))


def thumbnail(data: bytes) -> tuple[bytes, int, int]:
    """(WebP, width, height) of an image, no side above THUMBNAIL; raises UndecodableImage."""
    small = thumbnail_of(data, THUMBNAIL).pixels
    buffer = io.BytesIO()
    lossless = small.width * small.height <= LOSSLESS_PIXELS
    small.save(buffer, "WEBP", lossless=lossless, quality=70, method=4)
    return buffer.getvalue(), small.width, small.height


def _picture(found: tuple[bytes, int, int]) -> Picture:
    content, width, height = found
    scale = max(1, 66 // max(width, height))
    return Picture(
        uri=page.data_uri("image/webp", content), width=width * scale, height=height * scale, sharp=scale > 1
    )


def _within_budget(thumbnails: dict[int, tuple[bytes, int, int]]) -> tuple[dict[int, Picture], int]:
    kept: dict[int, Picture] = {}
    spent = 0
    for sample, found in thumbnails.items():
        spent += len(found[0])
        if spent > MAX_THUMBNAIL_BYTES:
            break
        kept[sample] = _picture(found)
    return kept, len(thumbnails) - len(kept)


def _in_order_of_worth(
    groups: Sequence[DuplicateGroup],
    pairs: Sequence[tuple[int, int, int, float]],
    fixed: Sequence[tuple[int, str, str]],
    by_class: dict[int, list[int]],
    by_shard: dict[int, list[int]],
) -> list[int]:
    """The samples that get a thumbnail, those first that must not fall out of the budget."""
    turns = [row for sheet in (by_class, by_shard) for row in _turns(list(sheet.values()))]
    first = [sample for group in groups[:MAX_SHOWN] for sample in group.samples[:4]]
    first += [sample for left, right, *_ in pairs[:MAX_SHOWN] for sample in (left, right)]
    return list(dict.fromkeys([*first, *(sample for sample, *_ in fixed), *turns]))


def _turns(sheets: Sequence[Sequence[int]]) -> Iterable[int]:
    """The first of every sheet, then the second of every one, ..."""
    for turn in range(max(map(len, sheets), default=0)):
        yield from (sheet[turn] for sheet in sheets if turn < len(sheet))


def _by_class(catalog: Catalog, num_classes: int) -> dict[int, list[int]]:
    each = max(1, min(EACH, CLASS_THUMBNAILS // max(1, num_classes)))
    found = looking.first_of_each(catalog, catalog.label, each)
    labels = [label for label in found if label >= 0]
    return {label: found[label] for label in _evenly(labels, CLASS_THUMBNAILS // each)}


def _by_shard(catalog: Catalog) -> dict[int, list[int]]:
    holder = np.repeat(np.arange(len(catalog.opened)), np.diff(catalog.starts))
    found = looking.first_of_each(catalog, holder, EACH)
    return {shard: found[shard] for shard in _evenly(list(found), SHARD_THUMBNAILS // EACH)}


def _evenly(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[place] for place in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _twins(storage: Storage, catalog: Catalog) -> tuple[list[DuplicateGroup], list[Damage]]:
    """Groups of samples with the same content, those over several splits first. Copies made by a build don't count."""
    originals = np.flatnonzero(catalog.copy == 0)
    crc, size = catalog.contents
    groups = [originals[group] for group in near_duplicates.equal_groups(crc[originals], size[originals])]
    groups.sort(key=lambda group: (-len(np.unique(catalog.split[group])), -len(np.unique(catalog.label[group]))))
    few = [group.tolist() for group in groups[:MAX_CONFIRMED]]
    asked = np.array([sample for group in few for sample in group[:EACH]], np.int64)
    digests, damage = looking.read_each(storage, catalog, asked, _digest)
    confirmed = [same for group in few for same in _same(group, digests)]
    rest = [_twins_of(catalog, group.tolist(), confirmed=False) for group in groups[MAX_CONFIRMED:]]
    found = [*(_twins_of(catalog, group, confirmed=True) for group in confirmed), *rest]
    return sorted(found, key=lambda one: (-one.splits, -one.labels, one.samples)), damage


def _same(group: list[int], digests: dict[int, bytes]) -> list[list[int]]:
    """A group cut into those that are really the same; beyond the first EACH, members are taken at their CRC's word."""
    read: dict[bytes, list[int]] = {}
    for sample in group[:EACH]:
        if sample in digests:
            read.setdefault(digests[sample], []).append(sample)
    same = [samples for samples in read.values() if len(samples) > 1]
    if len(read) == 1 and same:
        same[0] += group[EACH:]
    return same


def _twins_of(catalog: Catalog, group: list[int], *, confirmed: bool) -> DuplicateGroup:
    """Shown first are members of different splits and labels."""
    places = {(int(catalog.split[sample]), int(catalog.label[sample])): sample for sample in reversed(group)}
    first = list(places.values())[::-1]
    return DuplicateGroup(
        samples=tuple(dict.fromkeys([*first, *group])),
        splits=len({split for split, _ in places}),
        labels=len({label for _, label in places}),
        confirmed=confirmed,
    )


def _digest(contents: dict[str, bytes]) -> bytes:
    hasher = hashlib.sha256()
    for name, content in contents.items():
        if name != "cls":
            hasher.update(f"{name} {len(content)} ".encode() + content)
    return hasher.digest()


def _pairs(catalog: Catalog, looks: dict[int, ImageStats]) -> list[tuple[int, int, int, float]]:
    """(sample, the one of another split that it looks like, distance, correlation); the same content is no pair."""
    samples = np.array(sorted(looks), np.int64)
    shape = (len(samples), near_duplicates.GREY_HEIGHT, near_duplicates.GREY_WIDTH)
    greys = np.frombuffer(b"".join(looks[sample].grey for sample in samples.tolist()), np.uint8).reshape(shape)
    crc, size = catalog.contents
    found = []
    for pair in near_duplicates.near_pairs(greys, catalog.split[samples]):
        left, right = int(samples[pair.left]), int(samples[pair.right])
        if (crc[left], size[left]) != (crc[right], size[right]):
            found.append((left, right, pair.distance, pair.correlation))
    return found


def _fixed(storage: Storage, manifest: Manifest, catalog: Catalog) -> tuple[list[tuple[int, str, str]], list[Damage]]:
    """(sample, fix, original name) of a few fixed samples, as far as the plan tells."""
    starts = {(one.split, one.number): int(start) for one, start in zip(catalog.opened, catalog.starts, strict=False)}
    shards = [(one.split, one.number, one.index["key"]) for one in catalog.opened]
    try:
        found = read_fixes(storage, manifest, shards, MAX_SHOWN)
    except (DamagedShard, StorageError) as error:
        return [], [Damage("plan", str(error))]
    return [(starts[split, number] + row, fix, name) for split, number, row, fix, name in found], []


def _quarantine(
    manifest: Manifest, storage: Storage, raw: Storage | None
) -> tuple[list[RejectedSamples], list[tuple[str, str, int]], list[Damage]]:
    """The first entries, (split, reason, number) of all, and what is wrong with the list itself."""
    path = manifest.quarantine.path
    try:
        listed = quarantine.read(storage, manifest.quarantine) if manifest.quarantine.count else []
    except StorageError as error:
        return [], [], [Damage(path, f"can't be read: {error}")]
    entries = [entry for entry in listed if entry is not None]
    damage = [
        Damage(path, f"line {number} is not a JSON object; restore or rebuild it")
        for number, entry in enumerate(listed, 1)
        if entry is None
    ]
    reasons = Counter((str(entry.get("split", "")), str(entry.get("reason", ""))) for entry in entries)
    few = [_rejected(entry, raw) for entry in entries[:MAX_SHOWN]]
    return few, [(*key, number) for key, number in sorted(reasons.items(), key=lambda one: (-one[1], one[0]))], damage


def _rejected(entry: dict[str, Any], raw: Storage | None) -> RejectedSamples:
    place = (entry.get("object"), entry.get("offset"), entry.get("num_bytes"))
    known = isinstance(place[0], str) and all(isinstance(number, int) and number >= 0 for number in place[1:])
    return RejectedSamples(
        name=str(entry.get("name", "")),
        split=str(entry.get("split", "")),
        reason=str(entry.get("reason", "")),
        where=f"{place[0]} at byte {place[1]}, {page.size(place[2] or 0)}" if known else "",
        picture=_picture_of_rejected(str(place[0]), place[1] or 0, place[2] or 0, raw) if known and raw else None,
    )


def _picture_of_rejected(name: str, start: int, num_bytes: int, raw: Storage) -> Picture | None:
    """As much of a rejected image as can be shown; a cut JPEG is shown as far as it goes."""
    if is_absolute(name) or num_bytes > MAX_RAW_BYTES:
        return None
    try:
        data = raw.read(name, start, start + num_bytes)
    except (StorageError, ConfigError):
        return None  # the raw input may be gone: the list is what counts
    for attempt in (data, data + b"\xff\xd9"):
        try:
            return _picture(thumbnail(attempt))
        except UndecodableImage:
            continue
    return None
