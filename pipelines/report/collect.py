"""Collects what the page of a shard set shows: decodes images, finds duplicates, makes pictures.

Everything is bounded and depends only on the set, so that the same set and limits give the same
page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import ImageDraw

from pipelines.check.inspect import counted
from pipelines.check.problems import Problem, check_quarantine
from pipelines.images.encode import thumbnail_of
from pipelines.images.options import ImageOptions, options_to_read
from pipelines.report import alike
from pipelines.report.alike import DuplicateGroup, SimilarPair
from pipelines.report.catalog import MAX_SAMPLES, Catalog, open_catalog, ranks, read_images
from shardset.format.annotations import AnnotatedBox, boxes_in
from shardset.format.manifest import LoadedSet, Manifest
from shardset.html import page
from shardset.html.page import Picture

CLASS_PICTURES = 480
MAX_PICTURES_EACH = 12
"""Limit for one class; with many classes, each gets fewer."""

MAX_GROUP_SHOWN = 4
MAX_SHOWN = 24
"""Limit for groups of duplicates and for similar pairs."""

_PICTURE_SIDE = 96
_SIDE_WITH_BOXES = 256
_BOX = "#e6007a"
_GREY_FROM = 36
"""Longer side in pixels of the picture that is shrunk to the grey version."""


@dataclass(frozen=True, slots=True)
class ImageStats:
    """A decoded image: upright width and height in pixels, and a small grey version; `flat` ones
    have one colour. `boxes` has the label of each box, and whether it is partly outside.
    """

    width: int
    height: int
    grey: np.ndarray
    transparent: bool
    turned: bool
    flat: bool
    boxes: list[tuple[int, bool]]


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that the page shows beyond the manifest; samples are rows of the catalog.

    `num_chosen` images were chosen for decoding; `images` holds those that decoded. `by_class` has
    samples by label.
    """

    url: str
    manifest: Manifest
    catalog: Catalog
    num_chosen: int
    images: dict[int, ImageStats]
    duplicates: list[DuplicateGroup]
    near_duplicates: list[SimilarPair]
    by_class: dict[int, list[int]]
    pictures: dict[int, Picture]
    rejected: list[dict[str, Any]]
    damage: list[Problem]


def collect(loaded: LoadedSet, *, max_images: int, max_samples: int = MAX_SAMPLES) -> ReportData:
    """The contents of the page; reads all indexes, up to `max_images` images, and the images that
    it shows.
    """
    manifest, storage = counted(loaded), loaded.storage
    catalog, damaged_indexes = open_catalog(loaded, max_samples=max_samples)
    chosen = choose_images(catalog, max_images)
    options, labels = options_to_read(manifest), manifest.labels_by_category
    images, damaged_images = read_images(
        storage,
        catalog,
        chosen,
        lambda image, json: _stats(image, json, options, labels),
    )
    duplicates = alike.equal_images(catalog.rows, catalog.originals())
    pairs = _similar(catalog, images)
    by_class = _by_class(catalog, len(manifest.classes))
    shown = {
        *(sample for group in duplicates[:MAX_SHOWN] for sample in group.samples[:MAX_GROUP_SHOWN]),
        *(sample for pair in pairs[:MAX_SHOWN] for sample in (pair.left, pair.right)),
        *(sample for samples in by_class.values() for sample in samples),
    }
    pictures, damaged_pictures = read_images(
        storage,
        catalog,
        np.array(sorted(shown), np.int64),
        lambda image, json: _picture(image, json, options, labels),
    )
    rejected, damaged_list = check_quarantine(storage, manifest.quarantine)
    return ReportData(
        url=loaded.storage.url,
        manifest=manifest,
        catalog=catalog,
        num_chosen=len(chosen),
        images=images,
        duplicates=duplicates,
        near_duplicates=pairs,
        by_class=by_class,
        pictures=pictures,
        rejected=rejected,
        damage=list(
            dict.fromkeys([*damaged_indexes, *damaged_images, *damaged_pictures, *damaged_list])
        ),
    )


def choose_images(catalog: Catalog, max_images: int) -> np.ndarray:
    """At most `max_images` samples with images, ascending: an equal share of each split, or all
    that it has.
    """
    order, rank = _ranked(catalog, catalog.originals(), "split")
    return np.sort(order[np.argsort(rank, kind="stable")[:max_images]])


def _ranked(catalog: Catalog, samples: np.ndarray, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The samples by a column, then in random order; and the number of each among the samples of
    the same value.
    """
    order = samples[np.lexsort((catalog.rows["random"][samples], catalog.rows[column][samples]))]
    return order, ranks(catalog.rows[column][order])


def _stats(
    image: bytes, json: bytes, options: ImageOptions, labels: Mapping[int, int]
) -> ImageStats:
    small = thumbnail_of(image, _GREY_FROM, options)
    grey = small.pixels.convert("L").resize((alike.SIDE, alike.SIDE))
    flat = bool(np.ptp(np.asarray(small.pixels), axis=(0, 1)).max() < alike.MIN_CONTRAST)
    boxes = []
    for left, top, width, height, label, _ in _boxes(json, labels):
        right, bottom = left + width, top + height
        is_outside = min(left, top) < -1 or right > small.width + 1 or bottom > small.height + 1
        boxes.append((label, is_outside))
    return ImageStats(
        *(small.width, small.height, np.asarray(grey), small.transparent, small.turned, flat, boxes)
    )


def _picture(
    image: bytes, json: bytes, options: ImageOptions, labels: Mapping[int, int]
) -> Picture:
    """The picture of an image, with its boxes."""
    small = thumbnail_of(image, _SIDE_WITH_BOXES if labels else _PICTURE_SIDE, options)
    pixels, scale = small.pixels.convert("RGB"), small.pixels.width / small.width
    for box in _boxes(json, labels):
        left, top, width, height = (scale * number for number in box[:4])
        corners = left, top, left + width, top + height
        ImageDraw.Draw(pixels).rectangle(corners, outline=_BOX, width=2)
    return page.picture(pixels)


def _boxes(json: bytes, labels: Mapping[int, int]) -> list[AnnotatedBox]:
    """The boxes of a sample, in a set that has the category of each label."""
    return boxes_in(json, labels) if labels and json else []


def _similar(catalog: Catalog, images: dict[int, ImageStats]) -> list[SimilarPair]:
    """Pairs of similar images, without equal ones."""
    samples, content = sorted(images), catalog.rows[["image_crc32c", "image_bytes"]]
    greys = np.array([images[sample].grey for sample in samples], np.uint8).reshape(
        -1, alike.SIDE, alike.SIDE
    )
    found = alike.similar_pairs(greys, catalog.rows["split"][samples])
    pairs = [SimilarPair(samples[pair.left], samples[pair.right], pair.alike) for pair in found]
    return [pair for pair in pairs if content[pair.left] != content[pair.right]]


def _by_class(catalog: Catalog, num_classes: int) -> dict[int, list[int]]:
    """Random samples with images of each class, -1 for no label; of many classes, some spread
    evenly.
    """
    each = max(1, min(MAX_PICTURES_EACH, CLASS_PICTURES // max(1, num_classes)))
    order, rank = _ranked(catalog, np.flatnonzero(catalog.rows["image_bytes"] > 0), "label")
    by_class: dict[int, list[int]] = {}
    for sample in order[rank < each].tolist():
        by_class.setdefault(int(catalog.rows["label"][sample]), []).append(sample)
    step = -(-len(by_class) * each // CLASS_PICTURES) or 1
    return {label: by_class[label] for label in list(by_class)[::step]}
