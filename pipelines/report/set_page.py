"""`report.html`: a page about the contents of a shard set; docs/how-to/check.md explains it."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from rich.filesize import decimal

from pipelines import split_table
from pipelines.check.problems import lines_of
from pipelines.config import BuildConfig
from pipelines.report import alike
from pipelines.report.collect import MAX_GROUP_SHOWN, MAX_SHOWN, ReportData, collect
from shardset.errors import ConfigError, ShardsetError
from shardset.format import manifest as manifests
from shardset.html import page
from shardset.html.page import clip
from shardset.program import count, some_of

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


def write(url: str, output: str | None = None, *, max_images: int = IMAGES) -> WrittenPage:
    """Makes the page of the set at `url` (manifest or folder) or of a view, and stores it.

    Raises ManifestError without a valid manifest; ConfigError if the page would replace anything
    but a page. The page itself names any other damage.
    """
    if max_images < 0:
        raise ConfigError(f"--images is {max_images}, expected a whole number from 0")
    loaded = manifests.load(url)
    if loaded.view is not None:
        output = output or url.removesuffix(".parquet") + ".html"
    target, name = page.output_of(loaded.storage, output)
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
    return [
        *lines_of(written.data.damage, MAX_DAMAGE_PRINTED),
        f"report: {written.path} ({decimal(written.num_bytes)},"
        f" {count(len(written.data.images), 'image')} decoded)",
    ]


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


def render(data: ReportData) -> bytes:
    """The page as UTF-8."""
    manifest, splits = data.manifest, data.manifest.splits
    boxes = [box for image in data.images.values() for box in image.boxes]
    numbers = Counter(label for label, _ in boxes)
    columns = split_table.columns(split_table.of_set(splits))
    return page.render(
        "pipelines.report",
        "report.html",
        data=data,
        manifest=manifest,
        max_rows=MAX_ROWS,
        min_alike=alike.MIN_ALIKE,
        num_bytes=decimal(sum(split.num_tar_bytes for split in splits.values())),
        first_three=_first_three,
        flat=[data.sample(row)["key"] for row, image in data.images.items() if image.flat],
        boxes=boxes,
        numbers=numbers,
        box_rows=[
            (f"{info.label} {info.name}", [numbers[info.label]])
            for info in manifest.classes[: MAX_CLASSES if manifest.labels_by_category else 0]
        ],
        empty_classes={
            name: [info.name for info in manifest.classes if not split.class_totals[info.label]]
            for name, split in splits.items()
        },
        split_columns=list(columns),
        split_rows=list(zip(*columns.values(), strict=True)),
        class_rows=[
            (
                f"{info.label} {info.name} {info.wnid or ''}",
                [split.class_totals[info.label] for split in splits.values()],
            )
            for info in sorted(
                manifest.classes[:MAX_CLASSES],
                key=lambda info: -sum(split.class_totals[info.label] for split in splits.values()),
            )
        ],
        sizes=list(_sizes(data)),
        duplicates=data.duplicates[:MAX_SHOWN],
        max_shown=MAX_SHOWN,
        max_group=MAX_GROUP_SHOWN,
        damage=[astuple(each) for each in data.damage[:MAX_ROWS]],
        reasons=_reasons(data.rejected),
        rejected=data.rejected[:MAX_ROWS],
        options=[
            (name, json.dumps(value, sort_keys=True, ensure_ascii=False))
            for name, value in sorted(manifest.provenance.options.items())
        ],
    )


def _reasons(rejected: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    """(split, reason, raw samples), the most frequent first."""
    counts = Counter(
        (str(entry.get("split", "")), str(entry.get("reason", ""))) for entry in rejected
    )
    return [(*reason, number) for reason, number in counts.most_common()]


def _sizes(data: ReportData) -> Iterator[tuple[str, int, str, int, int, int]]:
    """For each split: its decoded images, their most frequent size, and their shorter sides."""
    by_split: dict[str, list[tuple[int, int]]] = {name: [] for name in data.manifest.splits}
    names = data.samples["split"]
    for row, image in data.images.items():
        by_split[names[row].as_py()].append((image.width, image.height))
    for name, sizes in by_split.items():
        if sizes:
            (width, height), times = Counter(sizes).most_common(1)[0]
            sides = sorted(map(min, sizes))
            most = f"{width} x {height} ({times / len(sizes):.0%})"
            yield name, len(sizes), most, sides[0], sides[len(sides) // 2], sides[-1]


def _first_three(names: list[str]) -> str:
    return some_of([clip(name, 40) for name in names], 3) + "." * (len(names) <= 3)
