"""`report.html`: a page about the contents of a shard set; docs/report.md explains it."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelines import sources
from pipelines.check.overview import ClassRow, ShardRow, SplitRow, overview
from pipelines.config import BuildConfig
from pipelines.report import near_duplicates
from pipelines.report.charts import class_plot, image_plots, shard_plots
from pipelines.report.classes import class_name, mixing_rows
from pipelines.report.collect import (
    CLASS_THUMBNAILS,
    MAX_GROUP_SHOWN,
    MAX_SHOWN,
    SHARD_THUMBNAILS,
    ReportData,
    collect,
)
from pipelines.report.duplicates import DuplicateGroup
from pipelines.report.findings import findings
from pipelines.report.snippets import loading_code, training_commands
from pipelines.report.thumbnails import MAX_THUMBNAIL_BYTES
from pipelines.write.replace import files_of
from shardset.errors import ConfigError, ShardsetError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from shardset.html import page
from shardset.program import count
from shardset.storage.base import Storage
from shardset.storage.open import open_file
from shardset.version import __version__

IMAGES = 100_000
"""Default limit of the verb for images decoded for sizes and near-duplicates."""

IMAGES_AFTER_BUILD = 4_000
"""The same limit after a build, where seconds count."""

MAX_PAGE_BYTES = 6 * 2**20
"""Upper bound of a page with all tables and pictures at their limits."""

MAX_ROWS = 1_000
MAX_FEW_ROWS = 200
MAX_DAMAGE_PRINTED = 20


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """A finished page: its contents, path and size."""

    data: ReportData
    path: str
    num_bytes: int


def write(
    url: str,
    output: str | None = None,
    *,
    max_images: int = IMAGES,
    raw: Storage | None = None,
    force: bool = False,
) -> WrittenPage:
    """Makes the page of the set at `url` (manifest or folder) and stores it.

    `raw` is the folder to which the names of the quarantine list are relative; without it, rejected samples have no
    pictures. Raises ManifestError without a valid manifest; ConfigError if the page would replace a file of the set or,
    without `force`, anything but a page. The page itself names any other damage.
    """
    if max_images < 0:
        raise ConfigError(f"--images is {max_images}, expected a whole number from 0")
    manifest, storage = manifests.load(url)
    target, name = (storage, naming.REPORT) if output is None else open_file(output)
    if f"{target.url}/{name}" in {f"{storage.url}/{own}" for own in (naming.MANIFEST, *files_of(manifest))}:
        raise ConfigError(f"{output} is a file of the shard set, which the page would replace; choose another --output")
    if not force:
        page.refuse_foreign(target, name)
    data = collect(manifest, storage, max_images=max_images, raw=raw)
    content = render(data)
    with target.writer(name) as out:
        out.write(content)
    return WrittenPage(data, f"{target.url}/{name}", len(content))


def after_build(config: BuildConfig) -> str | None:
    """Makes the page of a set that was just built, and returns its path; a failure is only a warning.

    The set is already published: a failed report must not make it look unfinished.
    """
    try:
        raw = sources.open_source(config).input
        written = write(config.output, max_images=IMAGES_AFTER_BUILD, raw=raw)
    except (ShardsetError, OSError) as error:
        print(f"warning: no report was made ({error}); the shard set is finished", file=sys.stderr)
        return None
    for line in _damage_lines(written.data):
        print(f"warning: {line}", file=sys.stderr)
    return written.path


def summary(written: WrittenPage) -> list[str]:
    """The lines that the verb prints."""
    data = written.data
    decoded = count(len(data.images), "image")
    return [*_damage_lines(data), f"report: {written.path} ({page.size(written.num_bytes)}, {decoded} decoded)"]


def _damage_lines(data: ReportData) -> list[str]:
    lines = [f"{each.where}: {each.sentence}" for each in data.damage[:MAX_DAMAGE_PRINTED]]
    more = len(data.damage) - len(lines)
    return [*lines, f"... and {more:,} more"] if more else lines


def to_json(written: WrittenPage) -> dict[str, Any]:
    """The verb's result for programs."""
    data = written.data
    return {
        "report": written.path,
        "num_bytes": written.num_bytes,
        "num_images_decoded": len(data.images),
        "duplicates": len(data.duplicates),
        "duplicates_across_splits": sum(group.num_splits > 1 for group in data.duplicates),
        "near_duplicates_across_splits": len(data.near_duplicates),
        "damage": [{"where": each.where, "sentence": each.sentence} for each in data.damage],
    }


def render(data: ReportData) -> bytes:
    """The page as UTF-8."""
    manifest = data.manifest
    rows = overview(manifest, "")
    return page.render(
        "pipelines.report",
        "report.html",
        data=data,
        manifest=manifest,
        max_rows=MAX_FEW_ROWS,
        title=f"Shard set from {manifest.provenance.source}",
        tool=f"shardset {__version__}",
        sections=_sections(data),
        closing=_closing(data),
        tiles=_tiles(manifest),
        findings=list(findings(data)),
        **_splits(manifest, rows.splits),
        **_classes(data, rows.classes),
        **_shards(data, rows.shards),
        image_plots=image_plots(data),
        image_text=_image_text(data),
        size_rows=_size_rows(data),
        **_duplicates(data),
        **_bad_input(data),
        options=[
            (name, json.dumps(value, sort_keys=True, ensure_ascii=False))
            for name, value in sorted(manifest.provenance.options.items())
        ],
        loading=loading_code(manifest),
        training=training_commands(manifest),
    )


def _sections(data: ReportData) -> list[tuple[str, str]]:
    """(anchor, title) for the table of contents."""
    classes = [("classes", "Classes")] if data.manifest.classes else []
    damage = [("damage", "Damage")] if data.damage else []
    rest = [("shards", "Shards"), ("images", "Images"), ("duplicates", "Duplicates"), ("bad", "Bad input")]
    return [*damage, *classes, *rest, ("provenance", "Provenance"), ("load", "How to load")]


def _tiles(manifest: Manifest) -> list[tuple[str, str, str]]:
    """(name, number, details) of the large numbers at the top."""
    splits = manifest.splits
    first = list(splits.items())[:4]
    samples = ", ".join(f"{name} {split.num_samples:,}" for name, split in first)
    by_split = ", ".join(f"{name} {split.num_shards:,}" for name, split in first)
    return [
        ("samples", f"{sum(split.num_samples for split in splits.values()):,}", samples),
        ("classes", f"{len(manifest.classes):,}", ""),
        ("shards", f"{sum(split.num_shards for split in splits.values()):,}", by_split),
        ("size", page.size(sum(sum(split.tar_bytes) for split in splits.values())), "of all tars"),
        ("quarantined", f"{manifest.quarantine.count:,}", ""),
        ("fixed", f"{sum(manifest.fixes.values()):,}", ""),
    ]


def _splits(manifest: Manifest, rows: list[SplitRow]) -> dict[str, Any]:
    samples = count(sum(row.num_samples for row in rows), "sample")
    shards = count(sum(row.num_shards for row in rows), "shard")
    return {
        "subtitle": f"{samples} in {shards}, digest {manifest.digest[:16]}",
        "splits": [
            (row.name, row.num_samples, row.num_shards, row.per_shard, page.size(row.num_bytes),
             page.size(row.mean_bytes), row.num_source_samples, row.num_dropped, row.num_repeats, " ".join(row.fields))
            for row in rows
        ],
    }  # fmt: skip


def _classes(data: ReportData, rows: list[ClassRow]) -> dict[str, Any]:
    names = list(data.manifest.splits)
    wnids = any(row.wnid for row in rows)
    sizes = {row.label: count(sum(row.counts.values()), "sample") for row in rows}
    return {
        "class_plot": class_plot(data.manifest) if rows else None,
        "class_columns": ["label#", "class~", *(["wnid"] if wnids else []), *(f"{name}#" for name in names)],
        "class_rows": [
            (row.label, row.name, *([row.wnid or ""] if wnids else []), *(row.counts[name] for name in names))
            for row in rows[:MAX_ROWS]
        ],
        "class_sheets": [
            _sheet(data, f"{label} {class_name(data.manifest, label)}", sizes.get(label, ""), samples)
            for label, samples in data.by_class.items()
        ],
    }


def _shards(data: ReportData, rows: list[ShardRow]) -> dict[str, Any]:
    shown = [(data.catalog.shards[number].shard, samples) for number, samples in data.by_shard.items()]
    return {
        "shard_plots": shard_plots(data.manifest),
        "mixing": mixing_rows(data.manifest),
        "shard_rows": [(row.path, row.num_samples, row.num_bytes, row.first_id) for row in rows[:MAX_FEW_ROWS]],
        "num_shards": len(rows),
        "shard_sheets": [
            _sheet(data, shard.path, count(shard.num_samples, "sample"), samples) for shard, samples in shown
        ],
    }


def _picture(data: ReportData, sample: int, before: str = "", after: str = "") -> dict[str, Any]:
    return {"picture": data.pictures.get(sample), "alt": f"{before}{data.catalog.key(sample)}{after}"}


def _image_text(data: ReportData) -> str:
    catalog, images = data.catalog, data.images.values()
    if not catalog.image_bytes.any():
        return "No sample has an image."
    candidates = int(((catalog.image_bytes > 0) & (catalog.copy == 0)).sum())
    modes = Counter(image.mode for image in images)
    kinds = [f"{modes[mode]:,} {name}" for mode, name in (("RGB", "in colour"), ("L", "grey")) if modes[mode]]
    if transparent := sum(image.transparent for image in images):
        kinds.append(f"{transparent:,} with transparency, shown on white")
    if turned := sum(image.turned for image in images):
        kinds.append(f"{turned:,} stored turned, shown upright")
    text = f"Stored bytes are those of all samples. {count(len(images), 'image')} of {candidates:,} were decoded"
    text += f": {', '.join(kinds)}." if kinds else "."
    if data.num_chosen < candidates:
        text += " They are a fixed random choice; `python -m pipelines report --images N` decodes N."
    return text


def _size_rows(data: ReportData) -> list[tuple[str, int, str]]:
    sizes = Counter((image.width, image.height) for image in data.images.values())
    return [
        (f"{width} x {height}", number, f"{100 * number / len(data.images):.1f} %")
        for (width, height), number in sorted(sizes.items(), key=lambda counted: (-counted[1], counted[0]))[:10]
    ]


def _sheet(data: ReportData, title: str, text: str, samples: Sequence[int]) -> dict[str, Any]:
    """A contact sheet of some samples."""
    shown = [sample for sample in samples if sample in data.pictures]
    pictures = [_picture(data, sample, after=f", {_label(data, sample)}") for sample in shown]
    return {"title": title, "text": text, "pictures": pictures, "left_out": len(samples) - len(pictures)}


def _label(data: ReportData, sample: int) -> str:
    return class_name(data.manifest, int(data.catalog.label[sample]))


def _member(data: ReportData, sample: int) -> dict[str, Any]:
    shard, position = data.catalog.locate(sample)
    return {
        "picture": data.pictures.get(sample),
        "key": data.catalog.key(sample),
        "label": _label(data, sample),
        "where": f"{shard.shard.path}, position {position}",
    }


def _duplicates(data: ReportData) -> dict[str, Any]:
    return {
        "duplicates": [_group(data, group) for group in data.duplicates[:MAX_SHOWN]],
        "near_duplicates": [
            {
                "text": f"{count(pair.distance, 'bit')} of 64 differ, correlation {pair.correlation:.3f}",
                "members": [_member(data, pair.left), _member(data, pair.right)],
                "more": 0,
            }
            for pair in data.near_duplicates[:MAX_SHOWN]
        ],
        "max_distance": near_duplicates.MAX_DISTANCE,
        "min_correlation": near_duplicates.MIN_CORRELATION,
    }


def _group(data: ReportData, group: DuplicateGroup) -> dict[str, Any]:
    kinds = ["in several splits"] if group.num_splits > 1 else []
    kinds += ["under different labels"] if group.num_labels > 1 else []
    text = f"{count(len(group.samples), 'sample')} {' and '.join(kinds) or 'in one split'}"
    return {
        "text": text if group.confirmed else f"{text} (by size and CRC32C)",
        "members": [_member(data, sample) for sample in group.samples[:MAX_GROUP_SHOWN]],
        "more": max(0, len(group.samples) - MAX_GROUP_SHOWN),
    }


def _bad_input(data: ReportData) -> dict[str, Any]:
    return {
        "damage": [(each.where, each.sentence) for each in data.damage[:MAX_FEW_ROWS]],
        "rejected": [
            ({"picture": one.picture, "alt": f"rejected image {one.name}"}, one.name, one.split, one.reason, one.where)
            for one in data.rejected
        ],
        "fixed": [
            (_picture(data, fixed.sample, "fixed image "), data.catalog.key(fixed.sample), fixed.fix, fixed.name)
            for fixed in data.fixed
        ],
    }


def _closing(data: ReportData) -> str:
    text = (
        f"Made by shardset {__version__} from the set alone: the same set and limits give the same page. "
        f"It holds {count(len(data.pictures), 'picture')} of samples, no script and no link to anywhere. "
        f"Limits: {CLASS_THUMBNAILS} pictures of classes, {SHARD_THUMBNAILS} of shards, "
        f"{page.size(MAX_THUMBNAIL_BYTES)} of pictures in all; a page stays below {page.size(MAX_PAGE_BYTES)}."
    )
    return text + (f" {count(data.num_left_out, 'picture')} did not fit." if data.num_left_out else "")
