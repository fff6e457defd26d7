"""Turns the summaries of all units into the plan of all splits."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pipelines.config import BuildConfig
from pipelines.holdout import REST, Holdout
from pipelines.images.annotations import ANNOTATIONS_SCALED, ANNOTATIONS_TURNED, RLE_LEFT_OUT
from pipelines.images.check import HOLDS_MORE, TRANSPARENT, TURNED
from pipelines.plan import layout, paths, summaries, tables
from pipelines.plan.append import are_numbers, base_of
from pipelines.plan.division import divide
from pipelines.plan.files import PlanFiles, encode_record
from pipelines.plan.layout import SplitPlan
from pipelines.plan.records import BuildFile, PlanFile
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
from shardset.storage.checked import read_same_twice
from shardset.storage.open import open_storage

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


def make_plan(files: PlanFiles, config: BuildConfig, build: BuildFile) -> PlanFile:
    """Writes the plan of all splits to `plan/` and returns it.

    Raises TooManyBad, SourceError (no samples, or labels without classes) or ConfigError
    (impossible sizes).
    """
    if config.holdout and build.num_units:
        divide(files, Holdout(config.holdout, config.seed), build.num_units)
    total = summaries.merge(read_summaries(files, build.num_units))
    summaries.refuse_too_many_bad(total, config.max_bad_fraction)
    if total.known.total and not any(count.num_samples for count in total.splits.values()):
        found = "; ".join(_notes_on_known(total.known))
        raise SourceError(f"{config.input}: nothing to append: the set has all of it; {found}")
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
    lost = [one.name for one in classes if one.label not in totals]
    if config.source == "folder" and lost and not config.append:
        raise SourceError(
            f"{config.input}: all images of class {lost[0]!r} are bad ({'; '.join(total.reasons)});"
            " mend them, or move the folder out of the input"
        )
    with files.writer(naming.quarantine_path(build.suffix)) as out:
        for line in _quarantine_lines(files, config, build):
            out.write(line)
    plan = PlanFile(
        digest="",
        source_digest=total.digest,
        num_classes=len(classes),
        classes=classes,
        splits=splits,
        fixes={fix: number for fix, number in total.fixes.items() if fix not in _NOTES},
        num_rejected=sum(count.num_rejected for count in total.splits.values()),
        num_units=build.num_units,
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


def _quarantine_lines(files: PlanFiles, config: BuildConfig, build: BuildFile) -> Iterator[bytes]:
    """The list of the set to which the build appends, but in a dry run; then the rejected samples
    of all units.
    """
    base, output = base_of(files, build.appends), files.output
    if base and base.quarantine.count and output.url == open_storage(config.output).url:
        name = base.quarantine.path
        yield read_same_twice(lambda: output.read(name), f"{output.url}/{name}")
    for summary in read_summaries(files, build.num_units):
        if any(count.num_rejected for count in summary.splits.values()):
            [table] = tables.read_units(files, [summary.unit])
            for entry in tables.rejected_of(table):
                yield entry.line


def _notes(total: UnitSummary, config: BuildConfig, classes: Sequence[ClassInfo]) -> Iterator[str]:
    """A sentence for each held-out split without samples, each split without classes that another
    one has, each mark that isn't a fix, and on the samples that were skipped.
    """
    strata = {split: one.strata for split, one in sorted(total.splits.items()) if one.strata}
    for split in sorted({*config.holdout, REST} - strata.keys()) if config.holdout else ():
        yield (
            f"--holdout {value_text(config.holdout)} left no image in split {split}, so there is no"
            " such split"
        )
    used = {label for labels in strata.values() for label in labels}
    for split, labels in strata.items():
        missing = [one.name for one in classes if one.label in used and one.label not in labels]
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
