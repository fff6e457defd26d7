"""The summary of the page: what is fine, and what needs attention."""

from collections.abc import Iterable

from pipelines.report.collect import ReportData
from shardset.format.manifest import Manifest
from shardset.html.page import Finding, clip
from shardset.program import count


def findings(data: ReportData) -> Iterable[Finding]:
    """One sentence per finding, in the order of the page."""
    if data.damage:
        places = count(len(data.damage), "place")
        text = f"{places} could not be read; `python -m pipelines verify --deep` checks everything."
        yield Finding(level="bad", text=text, anchor="damage")
    else:
        decoded = count(data.num_chosen, "image that was", "images that were")
        yield Finding(level="good", text=f"All indexes and the {decoded} decoded are as the manifest says.")
    yield from _duplicates(data)
    if num_rejected := data.manifest.quarantine.count:
        text = f"{count(num_rejected, 'raw sample is', 'raw samples are')} in quarantine: unusable, so left out."
        yield Finding(level="note", text=text, anchor="bad")
    else:
        yield Finding(level="good", text="No raw sample was rejected.")
    yield from _classes(data.manifest)
    yield from _images(data)
    if left_out := data.catalog.num_left_out:
        text = f"The set is so large that only some shards were read; {count(left_out, 'sample')} are not in them."
        yield Finding(level="note", text=text)


def class_name(manifest: Manifest, label: int) -> str:
    """The name of a class, or `no label`."""
    return manifest.classes[label].name if 0 <= label < len(manifest.classes) else "no label"


def _duplicates(data: ReportData) -> Iterable[Finding]:
    groups = data.duplicates
    if not groups:
        yield Finding(level="good", text="No two samples have the same image.")
    across = sum(group.num_splits > 1 for group in groups)
    conflicting = sum(group.num_labels > 1 for group in groups)
    inside = sum(group.num_splits == 1 and group.num_labels == 1 for group in groups)
    for level, number, one, many, text in [
        ("bad", across, "image is", "images are", "in several splits: evaluation meets what was trained on."),
        ("bad", conflicting, "image has", "images have", "more than one label."),
        ("note", inside, "image is", "images are", "stored more than once in a split, under one label."),
        ("note", len(data.near_duplicates), "image looks", "images look", "much like an image of another split."),
    ]:
        if number:
            yield Finding(level=level, text=f"{count(number, one, many)} {text}", anchor="duplicates")


def _classes(manifest: Manifest) -> Iterable[Finding]:
    counts = {name: split.class_totals for name, split in manifest.splits.items()}
    for name, numbers in counts.items():
        empty = [class_name(manifest, label) for label, number in enumerate(numbers) if not number]
        if empty and len(empty) < len(numbers):
            text = f"Split {name} has no sample of {count(len(empty), 'class', 'classes')}: {_first_three(empty)}"
            yield Finding(level="note", text=text, anchor="classes")
    totals = [sum(numbers) for numbers in zip(*counts.values(), strict=True)]
    if totals and min(totals) and max(totals) > 3 * min(totals):
        text = f"The largest class has {max(totals) / min(totals):.3g} times as many samples as the smallest."
        yield Finding(level="note", text=text, anchor="classes")


def _images(data: ReportData) -> Iterable[Finding]:
    flat = [data.catalog.key(sample) for sample, image in data.images.items() if image.flat]
    for verb, verbs, number, text in [
        ("is", "are", len(flat), f"nearly a single colour: {_first_three(flat)}"),
        ("has", "have", sum(image.transparent for image in data.images.values()),
         "transparency; the stream puts them on white, or on image.background; other readers may ignore it and show "
         "the colours beneath."),
        ("is", "are", sum(image.turned for image in data.images.values()),
         "stored turned, with an EXIF orientation; the stream turns them upright, other readers may not."),
    ]:  # fmt: skip
        if number:
            subject = count(number, f"decoded image {verb}", f"decoded images {verbs}")
            yield Finding(level="note", text=f"{subject} {text}", anchor="images")


def _first_three(names: list[str]) -> str:
    return ", ".join(clip(name, 40) for name in names[:3]) + (", ..." if len(names) > 3 else ".")
