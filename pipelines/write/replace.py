"""What a build may remove at its output: the files of the set that it replaces, and what an unfinished build left.

Both are known by name, from a manifest or from `plan/`. Whatever else stands there is somebody else's and stays.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress

import msgspec

from pipelines.plan import files
from pipelines.plan.job import read_record
from shardset.errors import ConfigError, ManifestError, NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from shardset.storage.base import Stat, Storage


class _Build(msgspec.Struct):
    """What is needed of `plan/build.json`, whichever version wrote it."""

    suffix: str
    before: list[str] = []


class _Split(msgspec.Struct):
    num_shards: int


class _Plan(msgspec.Struct):
    """The same of `plan/plan.json`."""

    splits: dict[str, _Split]


def manifest_at(output: Storage, name: str) -> Manifest | None:
    """The manifest that stands there, None if there is none; ManifestError if it does not say which files are its."""
    where = f"{output.url}/{name}"
    try:
        return files.checked(lambda: output.read(name), lambda data: manifests.parse(data, where), ManifestError)
    except NotFound:
        return None
    except ManifestError as error:
        raise ManifestError(f"{error}; --overwrite can't tell what to replace: move it away with its shards") from error


def files_of(manifest: Manifest | None) -> set[str]:
    """All files that a manifest lists; none if there is no manifest."""
    if manifest is None:
        return set()
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return {manifest.quarantine.path, *(path for shard in shards for path in (shard.path, shard.index.path))}


def left_behind(output: Storage) -> set[str]:
    """The files that the build whose `plan/` stands there may have written, and those of a set that it replaced."""
    found = _files_replaced(output)
    build: _Build | None = read_record(output, naming.BUILD, _Build)
    plan: _Plan | None = read_record(output, naming.PLAN, _Plan)
    if not build or not plan:
        return found
    for suffix in {build.suffix, *build.before}:
        found.add(naming.quarantine_path(suffix))
        for name, split in plan.splits.items():
            shards = [naming.shard_path(name + suffix, name, number) for number in range(split.num_shards)]
            found.update(shards, map(naming.index_path, shards))
    return found


def _files_replaced(output: Storage) -> set[str]:
    found = files.find(output, naming.REPLACED)
    return files_of(manifests.parse(bytes(found.content), f"{output.url}/{naming.REPLACED}")) if found else set()


def refuse_input(output: Storage, doomed: Iterable[str], source: Storage, objects: Iterable[str]) -> None:
    """Raises ConfigError if one of the files to be removed is one of the input's objects."""
    folder, mine = _place(output), {f"{_place(source)}/{name}" for name in objects}
    for name in sorted(doomed):
        if f"{folder}/{name}" in mine:
            raise ConfigError(
                f"{output.url}/{name} is read by this build, and --overwrite would remove it; choose another --output"
            )


def refuse_inside(output: Storage, source: Storage) -> None:
    """Raises ConfigError if the output is in the folder `source`, all of whose tars are the input."""
    if f"{_place(output)}/".startswith(f"{_place(source)}/"):
        raise ConfigError(
            f"{output.url}: all tars below {source.url} are read, so a rerun would take the shards for input; choose "
            "another --output, or name the tars as input"
        )


def refuse_among_raw(output: Storage, folder: Storage) -> None:
    """Raises ConfigError if the output is the folder of the raw input, or in it."""
    if f"{_place(output)}/".startswith(f"{_place(folder)}/"):
        raise ConfigError(
            f"{output.url}: is in the input {folder.url}, so tars would stand among the raw files; choose an --output "
            "outside of it"
        )


def remove(output: Storage, names: Collection[str], check_place: Callable[[], None]) -> None:
    """Removes those of the files that stand there while `check_place` says that it may.

    What another build writes there later stays: it has another generation.
    """
    seen = list(_standing(output, names))
    if seen:
        check_place()
    for found in seen:
        output.delete(found.name, generation=found.generation)


def _standing(output: Storage, names: Collection[str]) -> Iterator[Stat]:
    """Those of the files that stand there: of the output's other folders nothing is listed."""
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        if folder:
            yield from (found for found in output.list(f"{folder}/") if found.name in names)
    for name in sorted(name for name in names if "/" not in name):
        with suppress(NotFound):
            yield output.stat(name)


def remove_all(output: Storage, prefix: str, check_place: Callable[[], None]) -> None:
    """Removes the objects below a folder; see remove."""
    remove(output, {found.name for found in output.list(prefix)}, check_place)


def _place(storage: Storage) -> str:
    """The folder without the symbolic links on the way to it."""
    return storage.url if storage.is_remote else os.path.realpath(storage.url).rstrip("/")
