"""`report.html`: a page about the contents of a shard set; docs/report.md explains it."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.check.problems import lines_of
from pipelines.check.render import spread
from pipelines.config import BuildConfig
from pipelines.report import alike
from pipelines.report.collect import MAX_GROUP_SHOWN, MAX_SHOWN, ReportData, collect
from shardset.errors import ConfigError, ShardsetError
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest
from shardset.html import page, plots
from shardset.html.page import Finding, Picture, clip
from shardset.html.plots import Bars
from shardset.program import count

IMAGES = 100_000
"""Default limit of the verb for images decoded for sizes and near-duplicates."""

IMAGES_AFTER_BUILD = 4_000
"""The same limit after a build, where seconds count."""

MAX_CLASSES = 1_000
MAX_ROWS = 200
MAX_DAMAGE_PRINTED = 20

Shown = tuple[Picture | None, str, list[str]]
"""A sample of a contact sheet: its picture, name, and lines of a caption."""


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """A finished page: its contents, path and size."""

    data: ReportData
    path: str
    num_bytes: int


def write(
    url: str, output: str | None = None, *, max_images: int = IMAGES, force: bool = False
) -> WrittenPage:
    """Makes the page of the set at `url` (manifest or folder) or of a view, and stores it.

    Raises ManifestError without a valid manifest; ConfigError if the page would replace anything
    but a page, without `force`. The page itself names any other damage.
    """
    if max_images < 0:
        raise ConfigError(f"--images is {max_images}, expected a whole number from 0")
    loaded = manifests.load(url)
    if loaded.view is not None:
        output = output or url.removesuffix(".parquet") + ".html"
    target, name = page.output_of(loaded.storage, output, force=force)
    data = collect(loaded, max_images=max_images)
    content = render(data)
    target.write(name, content)
    return WrittenPage(data, f"{target.url}/{name}", len(content))


def after_build(config: BuildConfig) -> str | None:
    """Makes the page of a set that was just built, and returns its path; a failure is only a
    warning.

    The set is already published: a failed report must not make it look unfinished.
    """
    try:
        written = write(config.output, max_images=IMAGES_AFTER_BUILD)
    except (ShardsetError, OSError) as error:
        print(f"warning: no report was made ({error}); the shard set is finished", file=sys.stderr)
        return None
    for line in lines_of(written.data.damage, MAX_DAMAGE_PRINTED):
        print(f"warning: {line}", file=sys.stderr)
    return written.path


def summary(written: WrittenPage) -> list[str]:
    """The lines that the verb prints."""
    decoded = count(len(written.data.images), "image")
    size = page.size(written.num_bytes)
    damage = lines_of(written.data.damage, MAX_DAMAGE_PRINTED)
    return [*damage, f"report: {written.path} ({size}, {decoded} decoded)"]


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
        "damage": [asdict(each) for each in data.damage],
    }


# --- what the template shows ----------------------------------------------------------------------


def render(data: ReportData) -> bytes:
    """The page as UTF-8."""
    manifest = data.manifest
    splits = manifest.splits
    samples, shards = (
        sum(getattr(row, name) for row in splits.values()) for name in ("num_samples", "num_shards")
    )
    reasons = Counter(
        (str(entry.get("split", "")), str(entry.get("reason", ""))) for entry in data.rejected
    )
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
        subtitle=f"{count(samples, 'sample')} in {count(shards, 'shard')}, "
        f"digest {manifest.digest[:16]}",
        sections=[(title.split()[0].lower(), title) for title in titles],
        closing="Made from the set alone: the same set and limits give the same page, "
        "without scripts or links.",
        tiles=[
            (
                "samples",
                f"{samples:,}",
                _first_four({name: split.num_samples for name, split in splits.items()}),
            ),
            ("classes", f"{len(manifest.classes):,}", ""),
            (
                "shards",
                f"{shards:,}",
                _first_four({name: split.num_shards for name, split in splits.items()}),
            ),
            (
                "size",
                page.size(sum(split.num_tar_bytes for split in splits.values())),
                "of all tars",
            ),
            ("quarantined", f"{manifest.quarantine.count:,}", ""),
            ("fixed", f"{sum(manifest.fixes.values()):,}", ""),
        ],
        findings=list(findings(data)),
        splits=[
            (
                name,
                split.num_samples,
                split.num_shards,
                spread(min(split.shard_sizes), max(split.shard_sizes)),
                page.size(split.num_tar_bytes),
                page.size(split.mean_bytes),
                split.num_source_samples,
                split.num_dropped,
                split.num_repeats,
                " ".join(split.fields),
            )
            for name, split in splits.items()
        ],
        class_bars=Bars(
            "Samples of each class",
            "class",
            list(splits),
            [
                (
                    f"{info.label} {info.name} {info.wnid or ''}",
                    [one.class_totals[info.label] for one in splits.values()],
                )
                for info in manifest.classes[:MAX_CLASSES]
            ],
        ),
        class_sheets=[_sheet(data, label, samples) for label, samples in data.by_class.items()],
        image_text=_image_text(data),
        image_bars=list(_image_bars(data)),
        duplicates=[
            (
                _spread(group),
                _members(data, group.samples[:MAX_GROUP_SHOWN]),
                len(group.samples) - MAX_GROUP_SHOWN,
            )
            for group in data.duplicates[:MAX_SHOWN]
        ],
        near_duplicates=[
            (f"{pair.alike:.3f} alike", _members(data, [pair.left, pair.right]), 0)
            for pair in data.near_duplicates[:MAX_SHOWN]
        ],
        damage=[(each.where, each.sentence) for each in data.damage[:MAX_ROWS]],
        reasons=[
            (*reason, number)
            for reason, number in sorted(reasons.items(), key=lambda each: (-each[1], each[0]))
        ],
        rejected=[
            [entry.get(name, "") for name in ("name", "split", "reason")]
            for entry in data.rejected[:MAX_ROWS]
        ],
        options=[
            (name, json.dumps(value, sort_keys=True, ensure_ascii=False))
            for name, value in sorted(manifest.provenance.options.items())
        ],
    )


def _first_four(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in list(counts.items())[:4])


def _sheet(data: ReportData, label: int, samples: Sequence[int]) -> tuple[str, list[Shown], int]:
    """(title, samples of a contact sheet, samples without a picture)."""
    name = class_name(data.manifest, label)
    shown = [sample for sample in samples if sample in data.pictures]
    sheet: list[Shown] = [
        (data.pictures[one], f"{data.catalog.key(one)}, {name}", []) for one in shown
    ]
    return f"{label} {name}" if label >= 0 else name, sheet, len(samples) - len(shown)


def _members(data: ReportData, samples: Sequence[int]) -> list[Shown]:
    """Samples of a contact sheet, with their class, key and shard."""
    keys = [data.catalog.key(sample) for sample in samples]
    labels = [
        class_name(data.manifest, int(data.catalog.rows["label"][sample])) for sample in samples
    ]
    return [
        (data.pictures.get(sample), key, [label, key, data.catalog.path(sample)])
        for sample, key, label in zip(samples, keys, labels, strict=True)
    ]


def _spread(group: alike.DuplicateGroup) -> str:
    kinds = ["in several splits"] * (group.num_splits > 1) + ["under different labels"] * (
        group.num_labels > 1
    )
    return f"{count(len(group.samples), 'sample')} {' and '.join(kinds) or 'in one split'}"


def _image_text(data: ReportData) -> str:
    num_images = len(data.catalog.originals())
    if not num_images:
        return "No sample has an image."
    text = f"{count(len(data.images), 'image')} of {num_images:,} were decoded."
    if data.num_chosen < num_images:
        text += (
            " They are a fixed random choice; `python -m pipelines report --images N` decodes N."
        )
    return text


def _image_bars(data: ReportData) -> Iterator[Bars]:
    """The most frequent sizes, and the shorter sides if they differ."""
    splits = data.catalog.splits
    sizes = Counter(map(tuple, data.sizes[:, 1:].tolist()))
    if sizes:
        by_split = Counter(map(tuple, data.sizes.tolist()))
        most = sorted(sizes, key=lambda size: (-sizes[size], size))[:10]
        counts = [
            (f"{w} x {h}", [by_split[number, w, h] for number in range(len(splits))])
            for w, h in most
        ]
        which = "all" if data.has_all_sizes else "the decoded"
        yield Bars(f"Most frequent sizes of {which} images", "width x height", splits, counts)
    if len(sizes) > 1:
        shorter = data.sizes[:, 1:].min(axis=1)
        sides = {
            name: shorter[data.sizes[:, 0] == number].tolist() for number, name in enumerate(splits)
        }
        yield plots.histogram("Shorter side", "pixels", sides)


# --- the summary: what is fine, and what needs attention ------------------------------------------


def findings(data: ReportData) -> Iterator[Finding]:
    """One sentence per finding, in the order of the page."""
    if data.damage:
        places = count(len(data.damage), "place")
        yield Finding(
            "bad",
            f"{places} could not be read; `python -m pipelines verify --deep` checks all.",
            "damage",
        )
    else:
        decoded = count(data.num_chosen, "image that was", "images that were")
        yield Finding("good", f"All indexes and the {decoded} decoded are as the manifest says.")
    yield from _duplicates(data)
    if num_rejected := data.manifest.quarantine.count:
        rejected = count(num_rejected, "raw sample is", "raw samples are")
        yield Finding("note", f"{rejected} in quarantine: unusable, so left out.", "bad")
    else:
        yield Finding("good", "No raw sample was rejected.")
    yield from _classes(data.manifest)
    yield from _images(data)
    if left_out := data.catalog.num_left_out:
        text = (
            f"The set is so large that only some shards were read; {count(left_out, 'sample')} are"
            " not in them."
        )
        yield Finding("note", text)


def class_name(manifest: Manifest, label: int) -> str:
    """The name of a class, or `no label`."""
    return manifest.class_name(label) or "no label"


def _duplicates(data: ReportData) -> Iterator[Finding]:
    groups = data.duplicates
    if not groups:
        yield Finding("good", "No two samples have the same image.")
    across = sum(group.num_splits > 1 for group in groups)
    conflicting = sum(group.num_labels > 1 for group in groups)
    inside = sum(group.num_splits == 1 and group.num_labels == 1 for group in groups)
    for level, number, one, many, text in [
        (
            "bad",
            across,
            "image is",
            "images are",
            "in several splits: evaluation meets what was trained on.",
        ),
        ("bad", conflicting, "image has", "images have", "more than one label."),
        (
            "note",
            inside,
            "image is",
            "images are",
            "stored more than once in a split, under one label.",
        ),
        (
            "note",
            len(data.near_duplicates),
            "image looks",
            "images look",
            "much like an image of another split.",
        ),
    ]:
        if number:
            yield Finding(level, f"{count(number, one, many)} {text}", "duplicates")


def _classes(manifest: Manifest) -> Iterator[Finding]:
    counts = {name: split.class_totals for name, split in manifest.splits.items()}
    for name, numbers in counts.items():
        empty = [class_name(manifest, label) for label, number in enumerate(numbers) if not number]
        if empty and len(empty) < len(numbers):
            text = (
                f"Split {name} has no sample of {count(len(empty), 'class', 'classes')}:"
                f" {_first_three(empty)}"
            )
            yield Finding("note", text, "classes")
    totals = [sum(numbers) for numbers in zip(*counts.values(), strict=True)]
    if totals and min(totals) and max(totals) > 3 * min(totals):
        text = (
            f"The largest class has {max(totals) / min(totals):.3g} times as many samples as the"
            " smallest."
        )
        yield Finding("note", text, "classes")


def _images(data: ReportData) -> Iterator[Finding]:
    flat = [data.catalog.key(sample) for sample, image in data.images.items() if image.flat]
    for verb, verbs, number, text in [
        ("is", "are", len(flat), f"nearly a single colour: {_first_three(flat)}"),
        (
            "has",
            "have",
            sum(image.transparent for image in data.images.values()),
            "transparency; the stream puts them on white, or on image.background; other readers "
            "may ignore it and show the colours beneath.",
        ),
        (
            "is",
            "are",
            sum(image.turned for image in data.images.values()),
            "stored turned, with an EXIF orientation; the stream turns them upright, other readers "
            "may not.",
        ),
    ]:
        if number:
            subject = count(number, f"decoded image {verb}", f"decoded images {verbs}")
            yield Finding("note", f"{subject} {text}", "images")


def _first_three(names: list[str]) -> str:
    return ", ".join(clip(name, 40) for name in names[:3]) + (", ..." if len(names) > 3 else ".")
