"""`report.html`: what a shard set holds, on one page for people; `docs/report.md` explains it."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipelines import sources
from pipelines.check.inspect import overview
from pipelines.config import BuildConfig
from pipelines.images.encode import IMAGE_FIELDS
from pipelines.plan.job import put
from pipelines.report import near_duplicates
from pipelines.report.collect import (
    CLASS_THUMBNAILS,
    MAX_SHOWN,
    MAX_THUMBNAIL_BYTES,
    SHARD_THUMBNAILS,
    DuplicateGroup,
    SetReport,
    gather,
)
from pipelines.write.replace import files_of
from shardset.errors import ConfigError, ShardsetError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest, Split
from shardset.html import page, plots
from shardset.html.page import Finding, count
from shardset.html.plots import Plot
from shardset.storage.base import Storage
from shardset.storage.open import open_file, open_storage
from shardset.version import __version__

IMAGES = 100_000
IMAGES_AFTER_BUILD = 4_000
"""How many images are decoded for sizes and near-duplicates: by the verb, and by a build, where a few seconds count."""

MAX_PAGE_BYTES = 6 * 2**20
"""With all tables and pictures at their most a page stays below this."""

MAX_ROWS = 1_000
MAX_FEW_ROWS = 200
MAX_CLASS_BARS = 40
MAX_SHARD_BARS = 40


def write(
    url: str,
    output: str | None = None,
    *,
    max_images: int = IMAGES,
    raw: Storage | None = None,
    force: bool = False,
) -> tuple[SetReport, str, int]:
    """Makes the page of the set at `url` (manifest or folder) and stores it: report, where it stands, its bytes.

    `raw` is the folder that the quarantine's names are relative to; without it there are no pictures of those.
    Raises ManifestError if there is no sound manifest, ConfigError if the page would take the place of a file of the
    set or, without `force`, of anything but a page; anything else that is damaged is named on the page.
    """
    if max_images < 0:
        raise ConfigError(f"--images is {max_images}, expected a whole number from 0")
    manifest, storage = manifests.load(url)
    target, name = (storage, naming.REPORT) if output is None else open_file(output)
    if f"{target.url}/{name}" in {f"{storage.url}/{own}" for own in (naming.MANIFEST, *files_of(manifest))}:
        raise ConfigError(f"{output} is a file of the shard set, which the page would replace; choose another --output")
    if not force:
        page.refuse_foreign(target, name)
    report = gather(manifest, storage, max_images=max_images, raw=raw)
    data = render(report)
    put(target, name, data)
    return report, f"{target.url}/{name}", len(data)


def render(report: SetReport) -> bytes:
    """The page."""
    manifest = report.manifest
    found = overview(manifest, "")
    wnids = any(row.wnid for row in found.classes)
    return page.render(
        "pipelines.report",
        "report.html",
        title=f"Shard set from {manifest.provenance.source}",
        subtitle=f"{count(sum(row.num_samples for row in found.splits), 'sample')} in "
        f"{count(sum(row.num_shards for row in found.splits), 'shard')}, digest {manifest.digest[:16]}",
        tool=f"shardset {__version__}",
        sections=_sections(report),
        closing=_closing(report),
        digest=manifest.digest,
        tiles=_tiles(report),
        findings=list(_findings(report)),
        splits=[
            (row.name, row.num_samples, row.num_shards, _from_to(row.smallest, row.largest), page.size(row.num_bytes),
             page.size(row.mean_bytes), row.num_source_samples, row.num_dropped, row.num_repeats, " ".join(row.fields))
            for row in found.splits
        ],
        class_plot=_class_plot(manifest) if manifest.classes else None,
        class_columns=["label#", "class~", *(["wnid"] if wnids else []), *(f"{row.name}#" for row in found.splits)],
        class_rows=[
            (row.label, row.name, *([row.wnid or ""] if wnids else []), *(row.counts[name] for name in manifest.splits))
            for row in found.classes[:MAX_ROWS]
        ],
        num_classes=len(manifest.classes),
        class_sheets=[
            _sheet(report, f"{label} {_class_name(manifest, label)}", _in_class(manifest, label), samples)
            for label, samples in report.by_class.items()
        ],
        shard_plots=_shard_plots(manifest),
        mix=_mix(manifest),
        shard_rows=[
            (row.path, row.num_samples, row.num_bytes, row.first_id) for row in found.shards[:MAX_FEW_ROWS]
        ],
        num_shards=len(found.shards),
        shard_sheets=[
            _sheet(report, shard.path, count(shard.num_samples, "sample"), samples)
            for shard, samples in ((report.catalog.opened[at].shard, these) for at, these in report.by_shard.items())
        ],
        image_plots=_image_plots(report),
        image_words=_image_words(report),
        size_rows=_size_rows(report),
        groups=[_group(report, group) for group in report.groups[:MAX_SHOWN]],
        num_groups=len(report.groups),
        pairs=[_pair(report, *pair) for pair in report.pairs[:MAX_SHOWN]],
        num_pairs=len(report.pairs),
        near_words=_near_words(report),
        fixes=sorted(manifest.fixes.items()),
        fixed=[
            ({"picture": report.pictures.get(sample), "alt": f"fixed image {report.catalog.key(sample)}"},
             report.catalog.key(sample), fix, name)
            for sample, fix, name in report.fixed
        ],
        quarantine=manifest.quarantine,
        reasons=report.reasons[:MAX_FEW_ROWS],
        num_reasons=len(report.reasons),
        rejected=[
            ({"picture": one.picture, "alt": f"rejected image {one.name}"}, one.name, one.split, one.reason, one.where)
            for one in report.rejected
        ],
        damage=[(one.where, one.sentence) for one in report.damage[:MAX_FEW_ROWS]],
        num_damage=len(report.damage),
        facts=_facts(manifest),
        options=[
            (name, json.dumps(value, sort_keys=True, ensure_ascii=False))
            for name, value in sorted(manifest.provenance.options.items())
        ],
        notes=manifest.provenance.notes[:MAX_FEW_ROWS],
        loading=_loading(manifest),
        training=_training(manifest),
        max_rows=MAX_ROWS,
        max_few_rows=MAX_FEW_ROWS,
    )  # fmt: skip


def _sections(report: SetReport) -> list[tuple[str, str]]:
    classes = [("classes", "Classes")] if report.manifest.classes else []
    damage = [("damage", "Damage")] if report.damage else []
    rest = [("shards", "Shards"), ("images", "Images"), ("duplicates", "Duplicates"), ("bad", "Bad input")]
    return [*damage, *classes, *rest, ("provenance", "Provenance"), ("load", "How to load")]


def _tiles(report: SetReport) -> list[tuple[str, str, str]]:
    manifest = report.manifest
    splits = manifest.splits
    shards = [shard for split in splits.values() for shard in split.shards]
    samples = ", ".join(f"{name} {split.num_samples:,}" for name, split in list(splits.items())[:4])
    return [
        ("samples", f"{sum(split.num_samples for split in splits.values()):,}", samples),
        ("classes", f"{len(manifest.classes):,}", ""),
        (
            "shards",
            f"{len(shards):,}",
            ", ".join(f"{name} {split.num_shards:,}" for name, split in list(splits.items())[:4]),
        ),
        ("size", page.size(sum(shard.num_bytes for shard in shards)), "of all tars"),
        ("quarantined", f"{manifest.quarantine.count:,}", ""),
        ("fixed", f"{sum(manifest.fixes.values()):,}", ""),
    ]


def _findings(report: SetReport) -> Iterable[Finding]:
    quarantined, damaged = report.manifest.quarantine.count, len(report.damage)
    if damaged:
        text = f"{count(damaged, 'place')} could not be read; `python -m pipelines verify --deep` looks at everything."
        yield Finding(level="bad", text=text, anchor="damage")
    else:
        decoded = count(report.num_looked, "image that was", "images that were")
        yield Finding(level="good", text=f"All indexes and the {decoded} decoded are as the manifest says.")
    yield from _duplicate_findings(report)
    if quarantined:
        text = f"{count(quarantined, 'raw sample is', 'raw samples are')} in quarantine: unusable, and left out."
        yield Finding(level="note", text=text, anchor="bad")
    else:
        yield Finding(level="good", text="No raw sample was rejected.")
    yield from _class_findings(report.manifest)
    yield from _image_findings(report)
    if left_out := report.catalog.num_left_out:
        text = (
            f"The set is so large that only some shards were looked into; {count(left_out, 'sample')} are not in them."
        )
        yield Finding(level="note", text=text)


def _duplicate_findings(report: SetReport) -> Iterable[Finding]:
    across = sum(group.splits > 1 for group in report.groups)
    conflicting = sum(group.labels > 1 for group in report.groups)
    inside = sum(group.splits == 1 and group.labels == 1 for group in report.groups)
    if across:
        text = (
            f"{count(across, 'image stands', 'images stand')} in several splits: evaluation meets what was trained on."
        )
        yield Finding(level="bad", text=text, anchor="duplicates")
    if conflicting:
        text = f"{count(conflicting, 'image has', 'images have')} more than one label."
        yield Finding(level="bad", text=text, anchor="duplicates")
    if inside:
        text = f"{count(inside, 'image is', 'images are')} stored more than once in a split, under one label."
        yield Finding(level="note", text=text, anchor="duplicates")
    if not report.groups:
        yield Finding(level="good", text="No two samples have the same content.")
    if report.pairs:
        text = f"{count(len(report.pairs), 'image looks', 'images look')} much like an image of another split."
        yield Finding(level="note", text=text, anchor="duplicates")


def _image_findings(report: SetReport) -> Iterable[Finding]:
    flat = [sample for sample, look in report.looks.items() if look.flat]
    if flat:
        keys = ", ".join(page.clip(report.catalog.key(sample), 40) for sample in flat[:3])
        text = f"{count(len(flat), 'decoded image is', 'decoded images are')} nearly of one colour: {keys}"
        yield Finding(level="note", text=text + (", ..." if len(flat) > 3 else "."), anchor="images")
    transparent = sum(look.transparent for look in report.looks.values())
    if transparent:
        text = (
            f"{count(transparent, 'decoded image has', 'decoded images have')} transparency; the stream puts them on "
            "white, or on what image.background says; other readers may drop it and show what lies beneath."
        )
        yield Finding(level="note", text=text, anchor="images")


def _class_findings(manifest: Manifest) -> Iterable[Finding]:
    counts = {name: _class_counts(split) for name, split in manifest.splits.items()}
    for name, found in counts.items():
        empty = [label for label, number in enumerate(found) if not number]
        if empty and len(empty) < len(found):
            names = ", ".join(page.clip(_class_name(manifest, label), 40) for label in empty[:3])
            text = f"Split {name} has no sample of {count(len(empty), 'class', 'classes')}: {names}"
            yield Finding(level="note", text=text + (", ..." if len(empty) > 3 else "."), anchor="classes")
    totals = [sum(numbers) for numbers in zip(*counts.values(), strict=True)]
    if totals and min(totals) and max(totals) > 3 * min(totals):
        text = f"The largest class has {max(totals) / min(totals):.3g} times as many samples as the smallest."
        yield Finding(level="note", text=text, anchor="classes")


def _class_counts(split: Split) -> list[int]:
    return (
        np.sum([shard.class_counts for shard in split.shards], axis=0).tolist() if split.shards[0].class_counts else []
    )


def _class_name(manifest: Manifest, label: int) -> str:
    return manifest.classes[label].name if 0 <= label < len(manifest.classes) else "no label"


def _in_class(manifest: Manifest, label: int) -> str:
    if label >= len(manifest.classes):
        return ""
    return count(
        sum(shard.class_counts[label] for split in manifest.splits.values() for shard in split.shards), "sample"
    )


def _class_plot(manifest: Manifest) -> Plot:
    counts = {name: _class_counts(split) for name, split in manifest.splits.items()}
    if len(manifest.classes) <= MAX_CLASS_BARS:
        labels = [page.clip(info.name, 60) for info in manifest.classes]
        return plots.rows("Samples of each class", labels, counts, x_label="samples")
    ranked = {name: [*enumerate(sorted(found, reverse=True), 1)] for name, found in counts.items()}
    return plots.curves("Samples of each class, largest first", ranked, x_label="classes by their number of samples")


def _mix(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """For each split: by how many samples a shard's count of a class differs most from its even share, and where."""
    found = []
    for name, split in manifest.splits.items():
        total = np.array(_class_counts(split), float)
        if not len(total):
            continue
        counts = np.array([shard.class_counts for shard in split.shards], float)
        sizes = np.array([shard.num_samples for shard in split.shards], float)
        off = np.abs(counts - np.outer(sizes, total / max(1, split.num_samples)))
        shard, label = np.unravel_index(int(off.argmax()), off.shape)
        found.append(
            (name, f"{off[shard, label]:.1f}", _class_name(manifest, int(label)), split.shards[int(shard)].path)
        )
    return found


def _shard_plots(manifest: Manifest) -> list[Plot]:
    samples = {name: [shard.num_samples for shard in split.shards] for name, split in manifest.splits.items()}
    sizes = {name: [shard.num_bytes for shard in split.shards] for name, split in manifest.splits.items()}
    if sum(map(len, samples.values())) > MAX_SHARD_BARS:
        return [
            _histogram("Shards by their samples", samples, "samples"),
            _histogram("Shards by their size", sizes, "bytes"),
        ]
    labels = [f"{name} {number}" for name, split in manifest.splits.items() for number in range(split.num_shards)]
    return [
        plots.rows("Samples in each shard", labels, _one_below_the_other(samples), x_label="samples"),
        plots.rows("Size of each shard", labels, _one_below_the_other(sizes), x_label="bytes"),
    ]


def _one_below_the_other(values: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """For rows that belong to one series each: every series with zeros in the rows of the others."""
    return {
        name: [value if name == other else 0 for other, found in values.items() for value in found] for name in values
    }


def _image_plots(report: SetReport) -> list[Plot]:
    sizes = {}
    for number, name in enumerate(report.catalog.splits):
        stored = report.catalog.image_bytes[(report.catalog.split == number) & (report.catalog.image_bytes > 0)]
        if len(stored):
            sizes[name] = stored.tolist()
    found = [_histogram("Stored bytes of an image", sizes, "bytes")] if sizes else []
    looks = {
        name: [one for sample, one in report.looks.items() if report.catalog.split[sample] == number]
        for number, name in enumerate(report.catalog.splits)
    }
    looks = {name: ones for name, ones in looks.items() if ones}
    if len({(one.width, one.height) for ones in looks.values() for one in ones}) > 1:
        shorter = {name: [min(one.width, one.height) for one in ones] for name, ones in looks.items()}
        aspect = {name: [min(4.0, max(0.25, one.width / one.height)) for one in ones] for name, ones in looks.items()}
        found.append(_histogram("Shorter side", shorter, "pixels"))
        found.append(_histogram("Aspect (width over height, 0.25 to 4)", aspect, "width / height"))
    return found


def _histogram(title: str, values: Mapping[str, Sequence[float]], x_label: str) -> Plot:
    edges = plots.spread([value for found in values.values() for value in found])
    if edges[0] == edges[-1]:
        edges = [edges[0] - 0.5, edges[0] + 0.5]
    series = {name: np.histogram(found, edges)[0].tolist() for name, found in values.items()}
    return plots.histogram(title, edges, series, x_label=x_label)


def _image_words(report: SetReport) -> str:
    if not report.catalog.image_bytes.any():
        return "No sample has an image."
    able = int(((report.catalog.image_bytes > 0) & (report.catalog.copy == 0)).sum())
    colour = Counter(look.mode for look in report.looks.values())
    words = f"Stored bytes are those of all samples. {count(len(report.looks), 'image')} of {able:,} were decoded"
    kinds = [f"{colour[mode]:,} {name}" for mode, name in (("RGB", "in colour"), ("L", "grey")) if colour[mode]]
    transparent = sum(look.transparent for look in report.looks.values())
    kinds += [f"{transparent:,} with transparency, shown on white"] if transparent else []
    words += f": {', '.join(kinds)}." if kinds else "."
    if report.num_looked < able:
        words += " They are a fixed random choice; `python -m pipelines report --images N` looks at N."
    return words


def _size_rows(report: SetReport) -> list[tuple[str, int, str]]:
    sizes = Counter((look.width, look.height) for look in report.looks.values())
    return [
        (f"{width} x {height}", number, f"{100 * number / len(report.looks):.1f} %")
        for (width, height), number in sorted(sizes.items(), key=lambda one: (-one[1], one[0]))[:10]
    ]


def _near_words(report: SetReport) -> str:
    if len(report.manifest.splits) < 2:
        return "There is one split only, so nothing to compare it with."
    return (
        f"{count(len(report.looks), 'image')} were compared, each with all of the other splits. A pair has difference "
        f"hashes of which at most {near_duplicates.MAX_DISTANCE} of 64 bits differ, and small grey versions whose "
        f"correlation is at least {near_duplicates.MIN_CORRELATION}. Pictures without contrast are left out."
    )


def _sheet(report: SetReport, title: str, words: str, samples: Sequence[int]) -> dict[str, Any]:
    catalog, manifest = report.catalog, report.manifest
    pictures = [
        {
            "picture": report.pictures[sample],
            "alt": f"{catalog.key(sample)}, {_class_name(manifest, int(catalog.label[sample]))}",
        }
        for sample in samples
        if sample in report.pictures
    ]
    return {"title": title, "words": words, "pictures": pictures, "left_out": len(samples) - len(pictures)}


def _member(report: SetReport, sample: int) -> dict[str, Any]:
    catalog, manifest = report.catalog, report.manifest
    opened, row = catalog.at(sample)
    return {
        "picture": report.pictures.get(sample),
        "key": catalog.key(sample),
        "label": _class_name(manifest, int(catalog.label[sample])),
        "where": f"{opened.shard.path}, position {row}",
    }


def _group(report: SetReport, group: DuplicateGroup) -> dict[str, Any]:
    kinds = [
        *(["in several splits"] if group.splits > 1 else []),
        *(["under different labels"] if group.labels > 1 else []),
    ]
    words = f"{count(len(group.samples), 'sample')} {' and '.join(kinds) or 'in one split'}"
    words += "" if group.confirmed else " (by size and CRC32C)"
    return {
        "words": words,
        "members": [_member(report, sample) for sample in group.samples[:4]],
        "more": max(0, len(group.samples) - 4),
    }


def _pair(report: SetReport, left: int, right: int, distance: int, correlation: float) -> dict[str, Any]:
    words = f"{count(distance, 'bit')} of 64 differ, correlation {correlation:.3f}"
    return {"words": words, "members": [_member(report, left), _member(report, right)], "more": 0}


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    made = manifest.provenance
    return [
        ("made by", made.tool),
        ("source", made.source),
        ("seed", str(manifest.seed)),
        ("order version", str(manifest.order_version)),
        ("remainder", manifest.remainder),
        ("digest of the manifest", manifest.digest),
        ("digest of the plan", manifest.plan_digest),
        ("digest of the source", made.source_digest),
        *((f"library {name}", version) for name, version in sorted(made.libraries.items())),
    ]


def _loading(manifest: Manifest) -> str:
    """A snippet for plain webdataset, to be run in the folder of the manifest."""
    name = _train_split(manifest)
    split = manifest.splits[name]
    image = next((field for field in split.fields if field.rpartition(".")[2] in IMAGE_FIELDS), split.fields[0])
    first, last = split.shards[0].path, split.shards[-1].path
    listed = f"{first[:-10]}{{{first[-10:-4]}..{last[-10:-4]}}}.tar"
    numbered = [one.path for one in split.shards] == [f"{first[:-10]}{n:06d}.tar" for n in range(len(split.shards))]
    pattern = first if len(split.shards) == 1 else listed
    urls = (
        repr(pattern)
        if numbered
        else f"[shard['path'] for shard in json.load(open('manifest.json'))['splits'][{name!r}]['shards']]"
    )
    fields = ", ".join(repr(field) for field in ([image, "cls"] if "cls" in split.fields else [image]))
    decode = '.decode("pil")' if image.rpartition(".")[2] in IMAGE_FIELDS else ""
    return (
        f"{'' if numbered else 'import json' + chr(10)}import webdataset\n\n"
        f"samples = webdataset.WebDataset({urls}, shardshuffle={min(100, split.num_shards)})\n"
        f"for sample in samples.shuffle(1000){decode}.to_tuple({fields}):\n    ...\n"
    )


def _train_split(manifest: Manifest) -> str:
    return "train" if "train" in manifest.splits else next(iter(manifest.splits))


def _training(manifest: Manifest) -> str:
    train = _train_split(manifest)
    others = [name for name in manifest.splits if name != train]
    wanted = "" if train == "train" else f" --set train_split={train}"
    wanted += f" --set eval_split={others[0]}" if len(others) > 1 else ""
    return f"python -m pipelines verify . --deep\npython -m trainer train --manifest . --run-dir run{wanted}\n"


def _from_to(smallest: int, largest: int) -> str:
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def _closing(report: SetReport) -> str:
    words = (
        f"Made by shardset {__version__} from the set alone: the same set and limits give the same page. "
        f"It holds {count(len(report.pictures), 'picture')} of samples, no script and no link to anywhere. "
        f"Limits: {CLASS_THUMBNAILS} pictures of classes, {SHARD_THUMBNAILS} of shards, "
        f"{page.size(MAX_THUMBNAIL_BYTES)} of pictures in all; a page stays below {page.size(MAX_PAGE_BYTES)}."
    )
    return words + (f" {count(report.num_left_out, 'picture')} did not fit." if report.num_left_out else "")


def lines(report: SetReport, where: str, num_bytes: int) -> list[str]:
    """What the verb and a build print."""
    found = [f"{one.where}: {one.sentence}" for one in report.damage[:20]]
    found += [f"... and {len(report.damage) - 20:,} more"] if len(report.damage) > 20 else []
    return [*found, f"report: {where} ({page.size(num_bytes)}, {count(len(report.looks), 'image')} decoded)"]


def run(args: argparse.Namespace) -> int:
    """The verb: makes the page, prints where it is, and returns 1 if something of the set could not be read."""
    raw = open_storage(args.input) if args.input else None
    report, where, num_bytes = write(args.manifest, args.output, max_images=args.images, raw=raw, force=args.force)
    if args.json:
        print(json.dumps(to_json(report, where, num_bytes)))
    else:
        print("\n".join(lines(report, where, num_bytes)))
    return 1 if report.damage else 0


def after_build(config: BuildConfig) -> str | None:
    """Makes the page of a set that was built just now and returns where it is; a failure is a warning, no more.

    The set is published by then: nothing that goes wrong here may make it look unfinished.
    """
    try:
        raw = sources.open_source(config).input
        report, where, num_bytes = write(config.output, max_images=IMAGES_AFTER_BUILD, raw=raw)
    except (ShardsetError, OSError) as error:
        print(f"warning: no report was made ({error}); the shard set is finished", file=sys.stderr)
        return None
    for line in lines(report, where, num_bytes)[:-1]:
        print(f"warning: {line}", file=sys.stderr)
    return where


def to_json(report: SetReport, where: str, num_bytes: int) -> dict[str, Any]:
    """The verb's result for programs."""
    return {
        "report": where,
        "num_bytes": num_bytes,
        "num_images_decoded": len(report.looks),
        "duplicates": len(report.groups),
        "duplicates_across_splits": sum(group.splits > 1 for group in report.groups),
        "near_duplicates_across_splits": len(report.pairs),
        "damage": [{"where": one.where, "sentence": one.sentence} for one in report.damage],
    }
