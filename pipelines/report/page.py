"""`report.html`: a page about the contents of a shard set; docs/report.md explains it."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.check.render import spread
from pipelines.config import BuildConfig
from pipelines.report import alike
from pipelines.report.collect import MAX_GROUP_SHOWN, MAX_SHOWN, ReportData, collect
from pipelines.report.findings import class_name, findings
from shardset.errors import ConfigError, ShardsetError
from shardset.format import manifest as manifests
from shardset.html import page, plots
from shardset.html.plots import Bars
from shardset.program import count

IMAGES = 100_000
"""Default limit of the verb for images decoded for sizes and near-duplicates."""

IMAGES_AFTER_BUILD = 4_000
"""The same limit after a build, where seconds count."""

MAX_CLASSES = 1_000
MAX_ROWS = 200
MAX_DAMAGE_PRINTED = 20


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """A finished page: its contents, path and size."""

    data: ReportData
    path: str
    num_bytes: int


def write(url: str, output: str | None = None, *, max_images: int = IMAGES, force: bool = False) -> WrittenPage:
    """Makes the page of the set at `url` (manifest or folder) and stores it.

    Raises ManifestError without a valid manifest; ConfigError if the page would replace anything but a page, without
    `force`. The page itself names any other damage.
    """
    if max_images < 0:
        raise ConfigError(f"--images is {max_images}, expected a whole number from 0")
    manifest, storage = manifests.load(url)
    target, name = page.output_of(storage, output, force=force)
    data = collect(manifest, storage, max_images=max_images)
    content = render(data)
    with target.writer(name) as out:
        out.write(content)
    return WrittenPage(data, f"{target.url}/{name}", len(content))


def after_build(config: BuildConfig) -> str | None:
    """Makes the page of a set that was just built, and returns its path; a failure is only a warning.

    The set is already published: a failed report must not make it look unfinished.
    """
    try:
        written = write(config.output, max_images=IMAGES_AFTER_BUILD)
    except (ShardsetError, OSError) as error:
        print(f"warning: no report was made ({error}); the shard set is finished", file=sys.stderr)
        return None
    for line in _damage_lines(written.data):
        print(f"warning: {line}", file=sys.stderr)
    return written.path


def summary(written: WrittenPage) -> list[str]:
    """The lines that the verb prints."""
    decoded = count(len(written.data.images), "image")
    size = page.size(written.num_bytes)
    return [*_damage_lines(written.data), f"report: {written.path} ({size}, {decoded} decoded)"]


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


# --- what the template shows -----------------------------------------------------------------------------------------


def render(data: ReportData) -> bytes:
    """The page as UTF-8."""
    manifest = data.manifest
    splits = manifest.splits
    samples, shards = (sum(getattr(row, name) for row in splits.values()) for name in ("num_samples", "num_shards"))
    reasons = Counter((str(entry.get("split", "")), str(entry.get("reason", ""))) for entry in data.rejected)
    titles = ["Damage"] * bool(data.damage) + ["Classes"] * bool(manifest.classes)
    titles += ["Images", "Duplicates", "Bad input", "Provenance"]
    return page.render(
        "pipelines.report",
        "report.html",
        data=data,
        manifest=manifest,
        max_rows=MAX_ROWS,
        min_alike=alike.MIN_ALIKE,
        title=f"Shard set from {manifest.provenance.source}",
        subtitle=f"{count(samples, 'sample')} in {count(shards, 'shard')}, digest {manifest.digest[:16]}",
        sections=[(title.split()[0].lower(), title) for title in titles],
        closing="Made from the set alone: the same set and limits give the same page, without scripts or links.",
        tiles=[
            ("samples", f"{samples:,}", _first_four({name: split.num_samples for name, split in splits.items()})),
            ("classes", f"{len(manifest.classes):,}", ""),
            ("shards", f"{shards:,}", _first_four({name: split.num_shards for name, split in splits.items()})),
            ("size", page.size(sum(split.num_tar_bytes for split in splits.values())), "of all tars"),
            ("quarantined", f"{manifest.quarantine.count:,}", ""),
            ("fixed", f"{sum(manifest.fixes.values()):,}", ""),
        ],
        findings=list(findings(data)),
        splits=[
            (name, split.num_samples, split.num_shards, spread(min(split.shard_sizes), max(split.shard_sizes)),
             page.size(split.num_tar_bytes), page.size(split.mean_bytes), split.num_source_samples, split.num_dropped,
             split.num_repeats, " ".join(split.fields))
            for name, split in splits.items()
        ],
        class_bars=Bars("Samples of each class", "class", list(splits), [
            (f"{info.label} {info.name} {info.wnid or ''}", [one.class_totals[info.label] for one in splits.values()])
            for info in manifest.classes[:MAX_CLASSES]
        ]),
        class_sheets=[_sheet(data, label, samples) for label, samples in data.by_class.items()],
        image_text=_image_text(data),
        image_bars=list(_image_bars(data)),
        duplicates=[
            (_spread(group), _members(data, group.samples[:MAX_GROUP_SHOWN]), len(group.samples) - MAX_GROUP_SHOWN)
            for group in data.duplicates[:MAX_SHOWN]
        ],
        near_duplicates=[
            (f"{pair.alike:.3f} alike", _members(data, [pair.left, pair.right]), 0)
            for pair in data.near_duplicates[:MAX_SHOWN]
        ],
        damage=[(each.where, each.sentence) for each in data.damage[:MAX_ROWS]],
        reasons=[(*reason, number) for reason, number in sorted(reasons.items(), key=lambda each: (-each[1], each[0]))],
        rejected=[[entry.get(name, "") for name in ("name", "split", "reason")] for entry in data.rejected[:MAX_ROWS]],
        options=[
            (name, json.dumps(value, sort_keys=True, ensure_ascii=False))
            for name, value in sorted(manifest.provenance.options.items())
        ],
    )  # fmt: skip


def _first_four(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in list(counts.items())[:4])


def _sheet(data: ReportData, label: int, samples: Sequence[int]) -> tuple[str, list[tuple[Any, str, list[str]]], int]:
    """(title, samples of a contact sheet, samples without a picture)."""
    name = class_name(data.manifest, label)
    shown = [sample for sample in samples if sample in data.pictures]
    sheet: list[tuple[Any, str, list[str]]] = [
        (data.pictures[sample], f"{data.catalog.key(sample)}, {name}", []) for sample in shown
    ]
    return f"{label} {name}" if label >= 0 else name, sheet, len(samples) - len(shown)


def _members(data: ReportData, samples: Sequence[int]) -> list[tuple[Any, str, list[str]]]:
    """Samples of a contact sheet, with their class, key and shard."""
    keys = {sample: data.catalog.key(sample) for sample in samples}
    labels = [class_name(data.manifest, int(data.catalog.rows["label"][sample])) for sample in samples]
    return [
        (data.pictures.get(sample), keys[sample], [label, keys[sample], data.catalog.path(sample)])
        for sample, label in zip(samples, labels, strict=True)
    ]


def _spread(group: alike.DuplicateGroup) -> str:
    kinds = ["in several splits"] * (group.num_splits > 1) + ["under different labels"] * (group.num_labels > 1)
    return f"{count(len(group.samples), 'sample')} {' and '.join(kinds) or 'in one split'}"


def _image_text(data: ReportData) -> str:
    num_images = len(data.catalog.originals())
    if not num_images:
        return "No sample has an image."
    text = f"{count(len(data.images), 'image')} of {num_images:,} were decoded."
    if data.num_chosen < num_images:
        text += " They are a fixed random choice; `python -m pipelines report --images N` decodes N."
    return text


def _image_bars(data: ReportData) -> Iterator[Bars]:
    """Of decoded images the most frequent sizes, and the shorter sides if they differ."""
    splits = data.catalog.splits
    found = [(splits[data.catalog.rows["split"][sample]], image) for sample, image in data.images.items()]
    sizes = Counter((image.width, image.height) for _, image in found)
    if sizes:
        by_split = Counter((name, image.width, image.height) for name, image in found)
        most = sorted(sizes, key=lambda size: (-sizes[size], size))[:10]
        counts = [(f"{w} x {h}", [by_split[name, w, h] for name in splits]) for w, h in most]
        yield Bars("Most frequent sizes of the decoded images", "width x height", splits, counts)
    if len(sizes) > 1:
        sides = {name: [min(each.width, each.height) for split, each in found if split == name] for name in splits}
        yield plots.histogram("Shorter side", "pixels", sides)
