"""Collects what the page of a shard set shows: decodes images, finds duplicates, makes thumbnails.

Everything is bounded and depends only on the set, so that the same set and limits give the same page.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from pipelines.check.problems import Problem
from pipelines.images.encode import thumbnail_of
from pipelines.images.options import ImageOptions, options_to_read
from pipelines.report import near_duplicates
from pipelines.report.bad_input import FixedSample, RejectedSample, read_fixed, read_rejected
from pipelines.report.catalog import MAX_SAMPLES, Catalog, choose_images, choose_of_each, open_catalog
from pipelines.report.duplicates import DuplicateGroup, find_duplicates
from pipelines.report.near_duplicates import SimilarPair
from pipelines.report.samples import Fields, image_of, read_samples
from pipelines.report.thumbnails import MAX_THUMBNAIL_BYTES, thumbnail, within_budget
from shardset.format.manifest import Manifest
from shardset.html.page import Picture
from shardset.storage.base import Storage

CLASS_THUMBNAILS = 480
SHARD_THUMBNAILS = 240
MAX_THUMBNAILS_EACH = 12
"""Limit for one class or shard; with many classes, each gets fewer."""

MAX_GROUP_SHOWN = 4
"""Members of a group of duplicates."""

MAX_SHOWN = 24
"""Limit for groups of duplicates, pairs, quarantined samples and fixed samples, each."""

_GREY_FROM = 36
"""Longer side in pixels of the picture that is shrunk to the grey version for near-duplicates."""


@dataclass(frozen=True, slots=True)
class ImageStats:
    """What the report keeps of a decoded image: upright width and height in pixels, mode, and a small grey version.

    `flat` means that its small version on white is nearly a single colour.
    """

    width: int
    height: int
    mode: str
    grey: bytes
    transparent: bool
    turned: bool
    flat: bool


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that the page shows beyond the manifest; samples are numbers of the catalog.

    `num_chosen` images were chosen for decoding; `images` holds those that decoded.
    """

    manifest: Manifest
    catalog: Catalog
    num_chosen: int
    images: dict[int, ImageStats]
    duplicates: list[DuplicateGroup]
    near_duplicates: list[SimilarPair]
    by_class: dict[int, list[int]]
    by_shard: dict[int, list[int]]
    fixed: list[FixedSample]
    rejected: list[RejectedSample]
    reasons: list[tuple[str, str, int]]
    pictures: dict[int, Picture]
    num_left_out: int
    damage: list[Problem]


def collect(
    manifest: Manifest,
    storage: Storage,
    *,
    max_images: int,
    raw: Storage | None = None,
    max_samples: int = MAX_SAMPLES,
    max_thumbnail_bytes: int = MAX_THUMBNAIL_BYTES,
) -> ReportData:
    """The contents of the page; reads all indexes, up to `max_images` images, and the samples with a thumbnail."""
    catalog, damaged_indexes = open_catalog(storage, manifest, max_samples=max_samples)
    chosen = choose_images(catalog, max_images)
    options = options_to_read(manifest)
    images, damaged_images = read_samples(storage, catalog, chosen, lambda fields: _image_stats(fields, options))
    duplicates, damaged_duplicates = find_duplicates(storage, catalog)
    pairs = _find_near_duplicates(catalog, images)
    fixed, damaged_plan = read_fixed(storage, manifest, catalog, MAX_SHOWN)
    by_class, by_shard = _by_class(catalog, len(manifest.classes)), _by_shard(catalog)
    shown = _by_worth(duplicates, pairs, fixed, by_class, by_shard)
    thumbnails, damaged_shown = read_samples(
        storage, catalog, np.array(shown, np.int64), lambda fields: thumbnail(image_of(fields), options)
    )
    pictures, num_left_out = within_budget(thumbnails, shown, max_thumbnail_bytes)
    rejected, reasons, damaged_list = read_rejected(storage, manifest, raw, MAX_SHOWN)
    damage = damaged_indexes + damaged_images + damaged_duplicates + damaged_plan + damaged_shown + damaged_list
    return ReportData(
        manifest=manifest,
        catalog=catalog,
        num_chosen=len(chosen),
        images=images,
        duplicates=duplicates,
        near_duplicates=pairs,
        by_class=by_class,
        by_shard=by_shard,
        fixed=fixed,
        rejected=rejected,
        reasons=reasons,
        pictures=pictures,
        num_left_out=num_left_out,
        damage=list(dict.fromkeys(damage)),
    )


def _image_stats(fields: Fields, options: ImageOptions) -> ImageStats:
    small = thumbnail_of(image_of(fields), _GREY_FROM, options)
    grey = small.pixels.convert("L").resize((near_duplicates.GREY_WIDTH, near_duplicates.GREY_HEIGHT))
    flat = bool(np.ptp(np.asarray(small.pixels), axis=(0, 1)).max() < near_duplicates.MIN_CONTRAST)
    mode = small.pixels.mode
    return ImageStats(small.width, small.height, mode, grey.tobytes(), small.transparent, small.turned, flat)


def _find_near_duplicates(catalog: Catalog, images: dict[int, ImageStats]) -> list[SimilarPair]:
    """Pairs of similar images, without equal ones, which `find_duplicates` finds."""
    samples = np.array(sorted(images), np.int64)
    shape = (len(samples), near_duplicates.GREY_HEIGHT, near_duplicates.GREY_WIDTH)
    greys = np.frombuffer(b"".join(images[sample].grey for sample in samples.tolist()), np.uint8).reshape(shape)
    content = np.stack((catalog.image_crc32c, catalog.image_bytes), axis=1)
    pairs = [
        replace(pair, left=int(samples[pair.left]), right=int(samples[pair.right]))
        for pair in near_duplicates.similar_pairs(greys, catalog.split[samples])
    ]
    return [pair for pair in pairs if (content[pair.left] != content[pair.right]).any()]


def _by_class(catalog: Catalog, num_classes: int) -> dict[int, list[int]]:
    each = max(1, min(MAX_THUMBNAILS_EACH, CLASS_THUMBNAILS // max(1, num_classes)))
    samples = choose_of_each(catalog, catalog.label, each)
    labels = [label for label in samples if label >= 0]
    return {label: samples[label] for label in _evenly(labels, CLASS_THUMBNAILS // each)}


def _by_shard(catalog: Catalog) -> dict[int, list[int]]:
    shard_of = np.repeat(np.arange(len(catalog.shards)), np.diff(catalog.first_samples))
    samples = choose_of_each(catalog, shard_of, MAX_THUMBNAILS_EACH)
    return {shard: samples[shard] for shard in _evenly(list(samples), SHARD_THUMBNAILS // MAX_THUMBNAILS_EACH)}


def _evenly(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[number] for number in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _by_worth(
    duplicates: Sequence[DuplicateGroup],
    pairs: Sequence[SimilarPair],
    fixed: Sequence[FixedSample],
    by_class: dict[int, list[int]],
    by_shard: dict[int, list[int]],
) -> list[int]:
    """The samples that get a thumbnail, most important first: the budget may not suffice for the last ones."""
    samples = [
        *(sample for group in duplicates[:MAX_SHOWN] for sample in group.samples[:MAX_GROUP_SHOWN]),
        *(sample for pair in pairs[:MAX_SHOWN] for sample in (pair.left, pair.right)),
        *(each.sample for each in fixed),
        *_round_robin(by_class.values()),
        *_round_robin(by_shard.values()),
    ]
    return list(dict.fromkeys(samples))


def _round_robin(sheets: Collection[Sequence[int]]) -> Iterator[int]:
    """The first of every sheet, then the second of every one, ..."""
    return (sample for turn in zip_longest(*sheets) for sample in turn if sample is not None)
