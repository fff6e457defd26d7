"""Removes files of a set that is being replaced, of unfinished builds and of stopped compactions.

A manifest or `plan/` names them all, or the name says which version was being compacted. Any other
file may belong to somebody else and stays.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import chain

from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.files import PlanFiles
from pipelines.plan.records import BuildFile, PlanFile
from pipelines.write import history
from shardset.errors import ConfigError, ManifestError, NotFound, StorageError, TransientError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.format.manifest import Manifest
from shardset.program import count
from shardset.storage.base import Stat, Storage, try_to_delete

Kept = dict[str, StorageError]
"""Why files are still there that nothing needs any more, by their names."""

_COMPACTED = re.compile(
    r"(plan/shards/)?[A-Za-z0-9_-]+(?P<suffix>-v(?P<base>[0-9]{1,9})-[0-9a-f]{8})[/.-]"
)
"""A file that a compaction of version `base` writes."""


def manifest_at(output: Storage, name: str) -> Manifest | None:
    """The manifest of that name; None if it is absent.

    ManifestError if it can't be read, ConfigError if adopted.
    """
    where = f"{output.url}/{name}"
    try:
        manifest = manifests.read_head(output, name)
    except NotFound:
        return None
    except ManifestError as error:
        raise ManifestError(
            f"{error}; --overwrite can't tell what to replace: move it away with its shards"
        ) from error
    if not manifest.is_own:
        raise ConfigError(
            f"{where}: the tars of this set were adopted: shardset neither changes nor removes "
            "them; make a set of them in another folder with `build --source shardset`"
        )
    return manifest


def newest_of(url: str) -> tuple[Manifest, Storage]:
    """The newest version, to be changed; ConfigError for a view, older version or adopted set."""
    loaded = manifests.load_whole(url)
    found, storage = loaded.manifest, loaded.storage
    newest = manifest_at(storage, naming.MANIFEST)
    if newest is None or newest.digest != found.digest:
        advice = f"only the newest version can be changed; give {storage.url}"
        raise ConfigError(f"{url}: is version {found.number}, and {advice}")
    return found, storage


def unfinished_files(output: Storage) -> set[str]:
    """The files that the build in `plan/` may have written,
    and of the set that it replaces.
    """
    names = set[str]()
    if file := plan_files.find(output, paths.REPLACED):
        where = f"{output.url}/{paths.REPLACED}"
        names = manifests.files_of(manifests.parse(bytes(file.content), where))
    build = plan_files.find_record(output, paths.BUILD, BuildFile)
    plan = plan_files.find_record(output, paths.PLAN, PlanFile)
    if not build or not plan:
        return names
    for suffix in {build.suffix, *build.before}:
        names.add(naming.quarantine_path(suffix))
        for split, sizes in plan.splits.items():
            shards = [
                naming.shard_path(split + suffix, split, number)
                for number in range(sizes.num_shards)
            ]
            names.update(
                shards, map(naming.index_path, shards), [naming.table_path(split + suffix)]
            )
    return names


def planned(output: Storage, listed: Iterable[str]) -> set[str]:
    """The files of the plan, without those by which `repair` writes listed shards again."""
    names = {stat.name for stat in output.list(naming.PLAN_FOLDER)}
    kept = {*map(naming.references_of, listed)} & names
    files = set(filter(paths.is_plan_file, names)) - kept
    return {name for name in files if not (kept and name.startswith(paths.GROUPS))}


def refuse_input(
    output: Storage, names: Iterable[str], source: Storage, objects: Iterable[str]
) -> None:
    """Raises ConfigError if a file to be removed is one of the input's `objects`."""
    folder, inputs = _real_path(output), {f"{_real_path(source)}/{name}" for name in objects}
    for name in sorted(names):
        if f"{folder}/{name}" in inputs:
            raise ConfigError(
                f"{output.url}/{name} is read by this build, and --overwrite would remove it;"
                " choose another --output"
            )


def refuse_inside(output: Storage, folder: Storage, why: str) -> None:
    """Raises ConfigError if the output is the folder of the input, or in it."""
    if f"{_real_path(output)}/".startswith(f"{_real_path(folder)}/"):
        raise ConfigError(
            f"{output.url}: is in the input {folder.url}, {why}; choose an --output outside of it"
        )


def remove(files: PlanFiles, names: Collection[str]) -> Kept:
    """Removes the existing files among `names`, if the storage permits it; raises ManifestError if
    another build has started at the output.

    A file that another build writes in the meantime stays, because it has another generation.
    """
    found = list(existing(files.output, names))
    if found:
        files.check_current()
    return delete_all(files.output, found)


def remove_slices(files: PlanFiles) -> Kept:
    """Removes the data between the steps of a run."""
    return remove(files, {stat.name for stat in files.output.list(paths.SLICES)})


def remove_replaced(files: PlanFiles) -> Kept:
    """Removes the files of the set that a build has replaced, and last the file that names them,
    so that a rerun can continue.
    """
    output, content = files.output, files.find(paths.REPLACED)
    if content is None:
        return {}
    old = manifests.parse(bytes(content), f"{output.url}/{paths.REPLACED}")
    listed = manifests.files_of(old, *manifests.older(output))
    return (
        remove_stopped(output, old.number + 1)
        or remove(files, listed | {naming.REPORT})  # the report is about the old set
        or remove(files, {stat.name for stat in output.list(versions.FOLDER)})
        or remove(files, {paths.REPLACED})
    )


def existing(output: Storage, names: Collection[str]) -> Iterator[Stat]:
    """The existing files among `names`; lists only their folders."""
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        if folder:
            yield from (stat for stat in output.list(f"{folder}/") if stat.name in names)
    for name in sorted(name for name in names if "/" not in name):
        with suppress(NotFound):
            yield output.stat(name)


def delete_all(output: Storage, stats: Iterable[Stat]) -> Kept:
    """Deletes these objects, unless they were replaced, and returns those that it can't delete.

    Once the storage does not answer, the others are not tried.
    """
    lost: list[StorageError] = []

    def delete(stat: Stat) -> StorageError | None:
        error = lost[0] if lost else None
        error = error or try_to_delete(output, stat.name, generation=stat.generation)
        if isinstance(error, TransientError):
            lost.append(error)
        return error

    stats = list(stats)
    errors = plan_files.in_order(output, stats, delete)
    return {stat.name: error for stat, error in zip(stats, errors, strict=True) if error}


def note_on(kept: Kept) -> list[str]:
    """A sentence on files that could not be removed; none without any."""
    if not kept:
        return []
    what = f"{count(len(kept), 'file')} that nothing needs any more"
    return [f"{what} can't be removed and stay: {next(iter(kept.values()))}"]


def remove_stopped(output: Storage, number: int) -> Kept:
    """Removes what compactions of versions before `number` left: they can't publish any more."""
    made: dict[str, list[Stat]] = {}
    for stat in output.list():
        if (found := _COMPACTED.match(stat.name)) and int(found["base"]) < number:
            made.setdefault(found["suffix"], []).append(stat)
    loose = history.unlisted(output, {stat.name for stats in made.values() for stat in stats})
    unpublished = [
        stats for stats in made.values() if loose.issuperset(stat.name for stat in stats)
    ]
    return delete_all(output, chain(*unpublished))


def _real_path(storage: Storage) -> str:
    """The folder without symbolic links."""
    return storage.url if storage.is_remote else os.path.realpath(storage.url).rstrip("/")
