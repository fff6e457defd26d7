"""Turns the tables and summaries of all units into the plan of all splits.

Two decisions take all samples together, and are written into the tables of units: which split a
sample of a build with --holdout comes into, and which of several samples gets the key that they
want. With --holdout, equal images come into one split, and each class into all.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipelines.config import BuildConfig
from pipelines.holdout import REST, Holdout
from pipelines.images.annotation_geometry import (
    ANNOTATIONS_SCALED,
    ANNOTATIONS_TURNED,
    RLE_LEFT_OUT,
)
from pipelines.images.check import HOLDS_MORE, TRANSPARENT, TURNED
from pipelines.plan import layout, paths, summaries, tables
from pipelines.plan.append import are_numbers, base_of
from pipelines.plan.files import PlanFiles, encode_record
from pipelines.plan.index import write_unit
from pipelines.plan.layout import SplitPlan
from pipelines.plan.plan_records import Build, BuildFile, PlanFile
from pipelines.plan.summaries import MAX_REASONS, KnownCount, UnitSummary, read_summaries
from pipelines.sources.base import class_infos
from pipelines.sources.tar_fields import checked_fields
from shardset.errors import ConfigError, SourceError
from shardset.format import naming
from shardset.format.labels import NO_LABEL, notes_on
from shardset.format.manifest import ClassInfo
from shardset.order.permutation import ORDER_VERSION
from shardset.program import count, some_of
from shardset.settings import value_text
from shardset.storage.open import open_storage

Numbers = NDArray[np.uint64]

MAX_HASHES = 2**27
"""The hashes of keys that are compared at once: 2 GB."""

_NOTES = {
    TRANSPARENT: (
        "{} with transparency {} stored as they came; the stream puts them on a background (white; "
        "image.background)"
    ),
    TURNED: (
        "{} {} stored turned, as EXIF says; the stream turns them upright (image.upright), other"
        " readers may not"
    ),
    HOLDS_MORE: (
        "{} {} kept without restart markers, because a rewrite would lose what else the files hold:"
        " further images (MPO) or films"
    ),
    ANNOTATIONS_TURNED: (
        "{} {} annotated with width and height before EXIF turns; the annotations were turned, too"
    ),
    ANNOTATIONS_SCALED: (
        "{} {} annotated with another width and height of the same shape; the annotations were"
        " scaled"
    ),
    RLE_LEFT_OUT: "{} {} annotated by RLE, which is not moved; these segmentations were left out",
}
"""The words of the summary for images with a mark that isn't a fix."""

_STORE_KNOWN = "--known store stores them again"


def make_plan(made: Build, num_units: int) -> PlanFile:
    """Writes the plan of all splits to `plan/` and returns it.

    Raises TooManyBad, SourceError (no samples, or labels without classes) or ConfigError
    (impossible sizes).
    """
    files, config = made.files, made.config
    build = files.read_record(paths.BUILD, BuildFile)  # which has the classes
    if config.holdout and num_units:
        divide(files, Holdout(config.holdout, config.seed), num_units)
    total = summaries.merge(read_summaries(files, num_units))
    summaries.refuse_too_many_bad(total, config.max_bad_fraction)
    if total.known.total and not any(count.num_samples for count in total.splits.values()):
        notes = "; ".join(_notes_on_known(total.known))
        raise SourceError(f"{config.input}: nothing to append: the set has all of it; {notes}")
    splits = _plan_splits(config, total)
    totals = Counter[int]()
    for split in total.splits.values():
        totals.update(split.strata)
    classes = build.classes
    if classes is None:
        classes = class_infos(list(map(str, range(max(totals) + 1))))
    # an append counts the labels of the set as used
    known = range(build.appends.num_classes if build.appends else 0)
    largest = len(classes) - 1 if are_numbers(classes) else NO_LABEL
    on_labels = notes_on(config.input, dict.fromkeys(known, 0) | totals, largest, build.looked_for)
    lost = [info.name for info in classes if info.label not in totals]
    if config.source == "folder" and lost and not config.append:
        raise SourceError(
            f"{config.input}: all images of class {lost[0]!r} are bad ({'; '.join(total.reasons)});"
            " mend them, or move the folder out of the input"
        )
    num_samples = sum(split.num_source for split in splits.values())
    number_duplicates(files, num_units, num_samples)
    with files.writer(naming.quarantine_path(build.suffix)) as out:
        for line in _quarantine_lines(files, config, build, num_units):
            out.write(line)
    plan = PlanFile(
        digest="",
        source_digest=total.digest,
        num_classes=len(classes),
        classes=classes,
        splits=splits,
        fixes={fix: number for fix, number in total.fixes.items() if fix not in _NOTES},
        num_rejected=sum(count.num_rejected for count in total.splits.values()),
        num_units=num_units,
        notes=[
            *build.notes,
            *on_labels,
            *_notes(total, config, classes),
        ],
    )
    identity = [msgspec.to_builtins(plan), config.what_decides_bytes(), ORDER_VERSION]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    plan = msgspec.structs.replace(plan, digest=digest)
    files.write(paths.PLAN, encode_record(plan))
    return plan


def _plan_splits(config: BuildConfig, total: UnitSummary) -> dict[str, SplitPlan]:
    """The plan of each split that has samples."""
    names = sorted(split for split, count in total.splits.items() if count.num_samples)
    if not names:
        raise SourceError(
            f"{config.input}: no sample found; see `shardset build --help` for what is read"
        )
    refuse_unknown_splits(config, names)
    splits = {
        name: layout.plan_split(
            name,
            total.splits[name].strata,
            num_bytes=total.splits[name].num_bytes,
            fields=checked_fields(f"split {name!r}", total.fields[name]),
            sizing=config.sizing(name),
            balance=config.balance,
        )
        for name in names
    }
    _refuse_unknown_shards(config.only_shards, splits)
    return splits


def refuse_unknown_splits(config: BuildConfig, names: Sequence[str]) -> None:
    """Raises ConfigError if a size is given for a split that the input does not have."""
    sizes = config.num_shards | config.samples_per_shard | config.target_samples | config.repeat
    unknown = sorted(sizes.keys() - {*names, ""})
    if unknown:
        raise ConfigError(
            f"sizes were given for split {unknown[0]!r}, but the input has {', '.join(names)}"
        )


def _refuse_unknown_shards(
    wanted: Iterable[tuple[str, int]], splits: Mapping[str, SplitPlan]
) -> None:
    sizes = {name: split.num_shards for name, split in splits.items()}
    for name, number in sorted(wanted):
        if number >= sizes.get(name, 0):
            there = ", ".join(f"{split}:0-{size - 1}" for split, size in sizes.items())
            raise ConfigError(f"--only-shards {name}:{number}: no such shard, only {there}")


def _quarantine_lines(
    files: PlanFiles, config: BuildConfig, build: BuildFile, num_units: int
) -> Iterator[bytes]:
    """The list of the set to which the build appends, but in a dry run; then the rejected samples
    of all units.
    """
    base, output = base_of(files, build.appends), files.output
    if base and base.quarantine.count and output.url == open_storage(config.output).url:
        yield output.read(base.quarantine.path)
    for summary in read_summaries(files, num_units):
        if any(count.num_rejected for count in summary.splits.values()):
            [table] = tables.read_units(files, [summary.unit])
            for entry in tables.rejected_of(table):
                yield entry.line


def _notes(total: UnitSummary, config: BuildConfig, classes: Sequence[ClassInfo]) -> Iterator[str]:
    """A sentence for each held-out split without samples, each split without classes that another
    one has, each mark that isn't a fix, and on the samples that were skipped.
    """
    strata = {name: split.strata for name, split in sorted(total.splits.items()) if split.strata}
    for split in sorted({*config.holdout, REST} - strata.keys()) if config.holdout else ():
        yield (
            f"--holdout {value_text(config.holdout)} left no image in split {split}, so there is no"
            " such split"
        )
    used = {label for labels in strata.values() for label in labels}
    for split, labels in strata.items():
        missing = [info.name for info in classes if info.label in used and info.label not in labels]
        if missing:
            lacking = count(len(missing), "class", "classes")
            yield f"split {split} has no images of {lacking}: {some_of(missing, 5)}"
    for mark, note in _NOTES.items():
        if number := total.fixes.get(mark, 0):
            yield note.format(count(number, "image"), "is" if number == 1 else "are")
    yield from _notes_on_known(total.known)


def _notes_on_known(known: KnownCount) -> Iterator[str]:
    """A sentence each on the samples that the set has, on those that have changed since, and on
    images that it has under other names.
    """
    if known.total:
        splits = ", ".join(f"{number:,} in {split}" for split, number in known.splits.items())
        skipped = count(known.total, "sample")
        yield f"{skipped} skipped, because the set has their names ({splits}); {_STORE_KNOWN}"
    if known.num_changed:
        yield (
            f"{count(known.num_changed, 'sample')} of these had another size or generation when it"
            f" was stored ({some_of(known.changed, MAX_REASONS)}); the set keeps the old ones"
        )
    if known.num_images:
        images = count(known.num_images, "new image")
        yield f"{images} of the same bytes as others of the set, under other names"


def divide(files: PlanFiles, holdout: Holdout, num_units: int) -> None:
    """Writes each unit again of which a sample moves to another split.

    The columns that decide stay as they are, so a repetition does the same. Memory holds about 60
    bytes per sample.
    """
    units = list(tables.read_units(files, range(num_units), "label", "draw", "image_number"))
    labels, draws, images = (column.to_numpy() for column in tables.concat(units).columns)
    splits = splits_of(holdout, draws, images, labels)
    moves = splits != _by_bounds(draws, holdout.bounds)
    stop = 0
    for unit, part in enumerate(units):
        start, stop = stop, stop + len(part)
        if not moves[start:stop].any():
            continue
        [table] = tables.read_units(files, [unit])
        summary = files.read_record(paths.summary_path(unit), UnitSummary)
        rows = [
            msgspec.structs.replace(row, split=holdout.splits[split])
            for row, split in zip(tables.rows_of(table), splits[start:stop], strict=True)
        ]
        write_unit(files, unit, rows, tables.rejected_of(table), summary.known)


def number_duplicates(files: PlanFiles, num_units: int, num_samples: int) -> None:
    """Writes each unit again in which a sample wants the key of one before it: the row says how
    many there are.
    """
    num_parts = math.ceil(num_samples / MAX_HASHES)
    repeated = np.concatenate(
        [_repeated(files, num_units, part, num_parts) for part in range(num_parts)]
    )
    if not len(repeated):
        return
    numbers = np.zeros(len(repeated), np.int64)
    for unit, table in enumerate(tables.read_units(files, range(num_units), "key_hash")):
        hashes = table["key_hash"].to_numpy()
        places = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
        occurrence = np.zeros(len(table), np.int32)
        for row in np.flatnonzero(repeated[places] == hashes).tolist():
            occurrence[row] = numbers[places[row]]
            numbers[places[row]] += 1
        if occurrence.any():
            [table] = tables.read_units(files, [unit])
            table = tables.with_columns(table, {"occurrence": occurrence}, table.schema)
            files.write(paths.unit_path(unit), tables.to_bytes(table))


def _repeated(files: PlanFiles, num_units: int, part: int, num_parts: int) -> Numbers:
    """The hashes of keys that several samples want, sorted; of one part of all hashes."""
    bounds = [2**64 * number // num_parts for number in (part, part + 1)]
    parts = []
    for table in tables.read_units(files, range(num_units), "key_hash"):
        hashes = table["key_hash"].to_numpy()
        is_inside = (hashes >= np.uint64(bounds[0])) & (hashes <= np.uint64(bounds[1] - 1))
        parts.append(hashes[is_inside])
    hashes = np.concatenate(parts)
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def splits_of(
    holdout: Holdout, draws: Numbers, images: Numbers, labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The number of the split of each sample in `holdout.splits`.

    `draws` says where each falls alone, and samples with equal `images` fall where one of them
    does. Of the classes that lack a split then, the bounds move; a label of -1 is no class.
    """
    order = np.argsort(draws ^ images)  # neither the smallest draw nor the largest one comes first
    _, leaders, group = np.unique(images[order], return_index=True, return_inverse=True)
    together = np.empty_like(draws)
    together[order] = draws[order][leaders[group]]
    splits = _by_bounds(together, holdout.bounds)
    order = np.argsort(labels, kind="stable")
    for label, start, stop in tables.runs_of(labels[order]):
        rows = order[start:stop]
        if label != NO_LABEL and len(np.unique(splits[rows])) < len(holdout.splits):
            bounds = _bounds_within(np.unique(together[rows] / 2**64), holdout.bounds)
            splits[rows] = _by_bounds(together[rows], bounds)
    return splits


def _by_bounds(draws: Numbers, bounds: Sequence[float]) -> NDArray[np.int64]:
    return np.searchsorted(bounds, draws / 2**64, side="right")


def _bounds_within(positions: NDArray[np.float64], bounds: Sequence[float]) -> list[float]:
    """The bounds, moved as little as gives each split one of the positions; too few go to the last
    splits.
    """
    numbers = np.arange(len(bounds))
    free = np.searchsorted(positions, bounds) - numbers  # each cut is above the one before
    shifts = np.clip(np.maximum.accumulate(free), 1, len(positions) - len(bounds))
    cuts: list[float] = positions[np.maximum(shifts + numbers, 0)].tolist()
    return cuts
