"""Publishes the next version of a set, and says what the older ones have."""

from collections import Counter
from itertools import chain, takewhile, zip_longest

import msgspec

from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.plan_records import BuildFile, PlanFile
from shardset.errors import ManifestError, PreconditionFailed
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.format.manifest import Manifest, Quarantine, Split
from shardset.format.shards import StoredShards
from shardset.storage.base import ABSENT, Storage

_SUMS = (
    "num_samples",
    "num_source_samples",
    "num_dropped",
    "num_repeats",
    "num_content_bytes",
    "num_tar_bytes",
)


def has_shards_of(manifest: Manifest, plan: PlanFile) -> bool:
    """Whether a version has a group of that plan."""
    return any(group.plan_digest == plan.digest for group in manifest.groups)


def has_unfinished_plan(storage: Storage, newest: Manifest) -> bool:
    """Whether there is a plan of which no version has the shards; a compaction may have taken them
    from the newest.
    """
    plan = plan_files.find_record(storage, paths.PLAN, PlanFile)
    build = plan_files.find_record(storage, paths.BUILD, BuildFile)
    base = build.appends.base if build and build.appends else None
    later = takewhile(
        lambda version: version.digest != base, chain([newest], manifests.older(storage))
    )
    return plan is not None and not any(has_shards_of(version, plan) for version in later)


def publish(storage: Storage, base: Manifest, manifest: Manifest) -> None:
    """Makes `manifest` the newest version in place of `base`, which stays as `versions/N.json`.

    A kill leaves one of the two as the newest, and a repetition finishes. Raises ManifestError if
    the newest version is neither.
    """
    meanwhile = "another version was published meanwhile; run again, an append with --overwrite"
    where = f"{storage.url}/{naming.MANIFEST}"
    generation = storage.stat(naming.MANIFEST).generation
    newest = manifests.read_head(storage)
    if newest.digest == manifest.digest:
        if newest != manifest:  # of indexes that another version of Arrow wrote
            storage.write(naming.MANIFEST, manifests.to_json(manifest), if_generation=generation)
        return
    if newest.digest != base.digest:
        raise ManifestError(f"{where}: {meanwhile}")
    try:
        storage.write(versions.path(base.number), manifests.to_json(base), if_generation=ABSENT)
    except PreconditionFailed as error:
        raise ManifestError(
            f"{error}; it is of a set that was replaced: remove {versions.FOLDER} there"
        ) from error
    try:
        storage.write(naming.MANIFEST, manifests.to_json(manifest), if_generation=generation)
    except PreconditionFailed as error:
        raise ManifestError(f"{where}: {meanwhile}") from error


def appended(base: Manifest, added: Manifest) -> Manifest:
    """The version after `base`: its groups, then the groups of `added`, with the labels of the
    larger class list.
    """
    classes = max(base.classes, added.classes, key=len)
    both: dict[str, list[Split]] = {}
    for name, split in [*base.splits.items(), *added.splits.items()]:
        both.setdefault(name, []).append(split)
    fixes = Counter(base.fixes)
    fixes.update(added.fixes)
    provenance = base.provenance
    return msgspec.structs.replace(
        base,
        digest="",
        number=base.number + 1,
        classes=classes,
        splits={name: joined(splits, len(classes)) for name, splits in sorted(both.items())},
        quarantine=Quarantine(
            count=base.quarantine.count + added.quarantine.count, path=added.quarantine.path
        ),
        fixes=dict(sorted(fixes.items())),
        provenance=msgspec.structs.replace(
            provenance, appended=[*provenance.appended, added.provenance]
        ),
    )


def joined(splits: list[Split], num_classes: int) -> Split:
    """One split of the groups of several, in order."""
    totals = zip_longest(range(num_classes), *(split.class_totals for split in splits), fillvalue=0)
    return msgspec.structs.replace(
        splits[0],
        **{name: sum(getattr(split, name) for split in splits) for name in _SUMS},
        max_tar_bytes=max(split.max_tar_bytes for split in splits),
        fields=list(dict.fromkeys(field for split in splits for field in split.fields)),
        class_totals=[sum(numbers) for _, *numbers in totals],
        shards=StoredShards([group for split in splits for group in split.groups]),
    )
