"""Removes what only older versions of a set need, and finds what else may name their samples."""

from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import compress

import msgspec

from pipelines.check.problems import quarantine_entry
from pipelines.export.stale import CARD, stale
from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.write import history, replace
from pipelines.write.set_files import SetFiles, listed_by
from shardset.errors import ConfigError, NotFound, PreconditionFailed
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.format.manifest import Manifest
from shardset.storage.base import ABSENT, Storage

SINCE = f"{versions.FOLDER}removal.json"
"""When the old files of a compaction began to wait for their removal."""


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a compaction: the newest version, its lost samples, and their former shards.

    `waiting` files of older versions are removed by the same call from `after` (ISO 8601) on;
    `removed` counts those that were, by folder, with `num_bytes`, and `kept` says which can't be.
    `tags` name versions that go with them. `same_images` are the keys of samples that stay, though
    their images are equal to dropped ones. `side_files` may still name dropped samples.
    """

    version: int = 0
    num_samples: int
    num_shards: int
    waiting: int = 0
    after: str | None = None
    removed: dict[str, int] = {}
    num_bytes: int = 0
    kept: list[str] = []
    tags: list[str] = []
    same_images: list[str] = []
    side_files: list[str] = []


def refuse_unfinished(storage: Storage, newest: Manifest) -> None:
    """Raises ConfigError if a build or an append at the set has not ended."""
    both = (paths.BUILD, paths.PLAN)
    has_build, has_plan = (plan_files.generation_of(storage, name) != ABSENT for name in both)
    if has_build and (not has_plan or history.has_unfinished_plan(storage, newest)):
        advice = "holds an unfinished build or append; finish it first, with its own command"
        raise ConfigError(f"{storage.url}: {advice}")


def without(storage: Storage, version: Manifest, keys: Collection[str]) -> list[bytes] | None:
    """The lines of the quarantine list that name none of these keys; None if no line names one.

    A line names a key with or without an extension.
    """
    lines: list[bytes] = []
    with suppress(NotFound):  # an older one, removed by a call that was stopped then
        lines = storage.read(version.quarantine.path).splitlines(keepends=True)
    names = [str((quarantine_entry(line) or {}).get("name")) for line in lines]
    is_kept = [{name, naming.split_member(name)[0]}.isdisjoint(keys) for name in names]
    return None if all(is_kept) else [*compress(lines, is_kept)]


def retire(
    storage: Storage,
    keys: Collection[str],
    done: Compacted,
    *,
    grace: timedelta,
    now: datetime,
    side_files: bool,
) -> Compacted:
    """Removes older versions with shards that the newest lacks, or quarantine lists that name the
    keys, once `grace` is over.

    Files that only these need go with them, and with `side_files` also columns and exports with
    tars that are gone.
    """
    tagged = versions.tags(storage)  # before the versions, so that none is too new to be known
    newest = manifests.read_head(storage)
    others = list(manifests.older(storage))
    files = SetFiles(storage)
    kept = replace.delete_all(storage, files.of_stopped_compactions(newest.number))
    of_newest = listed_by(newest)

    def is_stale(version: Manifest) -> bool:
        lost = listed_by(version) - of_newest - {version.quarantine.path}
        return bool(lost) or without(storage, version, keys) is not None

    outdated = [version for version in others if is_stale(version)]
    left = [newest, *(version for version in others if version not in outdated)]
    listed = listed_by(*left)
    digests = {version.digest for version in left}
    tags = sorted(name for name, tag in tagged.items() if tag.digest not in digests)
    names = listed_by(*outdated) - listed
    sides = files.old_columns(listed)
    sides |= {name.removesuffix(".info.json") for name in stale(storage, newest)}
    done = msgspec.structs.replace(done, version=newest.number, tags=tags, side_files=sorted(sides))
    if outdated:
        after = _waiting_since(storage, now) + grace
        if now < after:
            when = after.isoformat(timespec="minutes")
            return msgspec.structs.replace(done, waiting=len(names), after=when)
        refuse_unfinished(storage, newest)  # one that has begun meanwhile would lose its plan
        tars = [name for name in names if name.endswith(".tar")]
        names |= files.unfinished() - listed  # of a set that was replaced
        names |= files.plan(listed)
        names |= {f"{tar}.idx" for tar in tars}
        names |= {naming.REPORT, *map(versions.tag_path, tags)}  # the page shows pictures of them
    if side_files:
        folders = [name for name in sides if name.endswith("/")]
        names |= sides | {stat.name for folder in folders for stat in storage.list(folder)}
        names -= {CARD}
        done = msgspec.structs.replace(done, side_files=sorted(sides & {CARD}))
    removed = list(replace.existing(storage, names))
    last = list(
        replace.existing(storage, {SINCE, *(versions.path(version.number) for version in outdated)})
    )
    kept |= replace.delete_all(storage, removed)
    if not kept:  # a rerun needs the manifests to know which files are left
        kept = replace.delete_all(storage, last)
        removed += last
    gone = [stat for stat in removed if stat.name not in kept]
    return msgspec.structs.replace(
        done,
        removed=dict(Counter(stat.name.rpartition("/")[0] for stat in gone)),
        num_bytes=sum(stat.num_bytes for stat in gone),
        kept=replace.note_on(kept),
    )


def _waiting_since(storage: Storage, now: datetime) -> datetime:
    """When the old files began to wait: now, unless an earlier call has noted it."""
    with suppress(PreconditionFailed):
        storage.write(SINCE, msgspec.json.encode(now), if_generation=ABSENT)
    try:
        return msgspec.json.decode(storage.read(SINCE), type=datetime)
    except msgspec.DecodeError as error:
        advice = "not readable; remove it, and old files wait again"
        raise ConfigError(f"{storage.url}/{SINCE}: {advice}") from error
