"""Removes files of a set that is being replaced, of unfinished builds and of stopped compactions.

A manifest or `plan/` names them all, or the name says which version was being compacted. Any other
file may belong to somebody else and stays.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.files import PlanFiles
from pipelines.plan.records import BuildFile, PlanFile
from pipelines.write import history
from shardset.errors import ConfigError, ManifestError, NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from shardset.storage.base import Stat, Storage

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
    """The files of the plan, without those that name the samples of listed shards."""
    names = {stat.name for stat in output.list(naming.PLAN_FOLDER)}
    return set(filter(paths.is_plan_file, names)).difference(map(naming.references_of, listed))


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


def remove(files: PlanFiles, names: Collection[str]) -> None:
    """Removes the existing files among `names`; raises ManifestError if another build has started
    at the output.

    A file that another build writes in the meantime stays, because it has another generation.
    """
    found = list(existing(files.output, names))
    if found:
        files.check_current()
    delete_all(files.output, found)


def remove_slices(files: PlanFiles) -> None:
    """Removes the data between the steps of a run."""
    remove(files, {stat.name for stat in files.output.list(paths.SLICES)})


def existing(output: Storage, names: Collection[str]) -> Iterator[Stat]:
    """The existing files among `names`; lists only their folders."""
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        if folder:
            yield from (stat for stat in output.list(f"{folder}/") if stat.name in names)
    for name in sorted(name for name in names if "/" not in name):
        with suppress(NotFound):
            yield output.stat(name)


def delete_all(output: Storage, stats: Iterable[Stat]) -> None:
    """Deletes these objects, unless they were replaced."""

    def delete(stat: Stat) -> None:
        output.delete(stat.name, generation=stat.generation)

    for _ in plan_files.in_order(output, stats, delete):
        pass


def remove_stopped(output: Storage, number: int) -> None:
    """Removes what compactions of versions before `number` left: they can't publish any more."""
    made: dict[str, list[Stat]] = {}
    for stat in output.list():
        if (found := _COMPACTED.match(stat.name)) and int(found["base"]) < number:
            made.setdefault(found["suffix"], []).append(stat)
    loose = history.unlisted(output, {stat.name for stats in made.values() for stat in stats})
    for stats in made.values():
        if loose.issuperset(stat.name for stat in stats):  # else it was published
            delete_all(output, stats)


def _real_path(storage: Storage) -> str:
    """The folder without symbolic links."""
    return storage.url if storage.is_remote else os.path.realpath(storage.url).rstrip("/")
