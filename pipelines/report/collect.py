"""Collects what the page of a shard set shows: decodes images, finds duplicates, makes pictures.

Everything is bounded and depends only on the set, so that the same set and limits give the same
page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import ImageDraw

from pipelines.check.inspect import counted
from pipelines.check.problems import Problem, check_quarantine
from pipelines.images.encode import thumbnail_of
from pipelines.images.options import ImageOptions, options_to_read
from pipelines.report import alike
from pipelines.report.alike import DuplicateGroup, SimilarPair
from pipelines.report.catalog import MAX_SAMPLES, open_catalog, read_images, rows_by
from shardset.format.annotations import AnnotatedBox, boxes_in
from shardset.format.manifest import LoadedSet, Manifest
from shardset.format.rows import numbers
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

    `num_originals` have an image and are no repeats that the build made; `num_chosen` of these were
    chosen for decoding, and `images` holds those that decoded. `by_class` has samples by label.
    `num_left_out` are not in the catalog.
    """

    url: str
    manifest: Manifest
    samples: pa.Table
    num_left_out: int
    num_originals: int
    num_chosen: int
    images: dict[int, ImageStats]
    duplicates: list[DuplicateGroup]
    near_duplicates: list[SimilarPair]
    by_class: dict[int, list[int]]
    pictures: dict[int, Picture]
    rejected: list[dict[str, Any]]
    damage: list[Problem]

    def sample(self, row: int) -> dict[str, Any]:
        """What the catalog says of a sample."""
        [facts] = self.samples.slice(row, 1).to_pylist()
        return dict(facts)


def collect(loaded: LoadedSet, *, max_images: int, max_samples: int = MAX_SAMPLES) -> ReportData:
    """The contents of the page; reads all indexes, up to `max_images` images, and the images that
    it shows.
    """
    manifest, storage = counted(loaded), loaded.storage
    samples, num_left_out, damaged_indexes = open_catalog(loaded, max_samples=max_samples)
    columns = ["row", "split", "label", "copy", "random", "image.bytes"]
    pictured = samples.select(columns).filter(pc.field("image.bytes") > 0)
    by_split = rows_by("split", pictured.filter(pc.field("copy") == 0))
    turns = zip_longest(*by_split.values())  # an equal share of each split, or all that it has
    in_turn = (row for turn in turns for row in turn if row is not None)
    chosen = sorted(islice(in_turn, max_images))
    options, labels = options_to_read(manifest), manifest.labels_by_category
    images, damaged_images = read_images(
        storage,
        samples,
        chosen,
        lambda image, json: _stats(image, json, options, labels),
    )
    duplicates, pairs = alike.equal_images(samples), _similar(samples, images)
    by_class = _by_class(pictured, len(manifest.classes))
    shown = {
        *(sample for group in duplicates[:MAX_SHOWN] for sample in group.samples[:MAX_GROUP_SHOWN]),
        *(sample for pair in pairs[:MAX_SHOWN] for sample in (pair.left, pair.right)),
        *(sample for of_class in by_class.values() for sample in of_class),
    }
    pictures, damaged_pictures = read_images(
        storage,
        samples,
        sorted(shown),
        lambda image, json: _picture(image, json, options, labels),
    )
    rejected, damaged_list = check_quarantine(storage, manifest.quarantine)
    damage = [*damaged_indexes, *damaged_images, *damaged_pictures, *damaged_list]
    return ReportData(
        url=loaded.storage.url,
        manifest=manifest,
        samples=samples,
        num_left_out=num_left_out,
        num_originals=sum(map(len, by_split.values())),
        num_chosen=len(chosen),
        images=images,
        duplicates=duplicates,
        near_duplicates=pairs,
        by_class=by_class,
        pictures=pictures,
        rejected=rejected,
        damage=list(dict.fromkeys(damage)),
    )


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


def _similar(samples: pa.Table, images: dict[int, ImageStats]) -> list[SimilarPair]:
    """Pairs of similar images, without equal ones."""
    rows, shape = sorted(images), (-1, alike.SIDE, alike.SIDE)
    greys = np.array([images[row].grey for row in rows], np.uint8).reshape(shape)
    splits = np.array(samples["split"].take(pa.array(rows, pa.int64())).to_pylist())
    pairs = alike.similar_pairs(rows, greys, splits)
    crcs = numbers(samples, "image_crc32c")
    return [pair for pair in pairs if crcs[pair.left] != crcs[pair.right]]


def _by_class(samples: pa.Table, num_classes: int) -> dict[int, list[int]]:
    """Random ones of these samples by class, -1 for no label; of many classes, some spread
    evenly.
    """
    each = max(1, min(MAX_PICTURES_EACH, CLASS_PICTURES // max(1, num_classes)))
    by_class = rows_by("label", samples)
    step = -(-len(by_class) * each // CLASS_PICTURES) or 1
    return {label: by_class[label][:each] for label in list(by_class)[::step]}
