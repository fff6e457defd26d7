"""Removes files of a set that is being replaced, of unfinished builds and of stopped compactions;
`SetFiles` says which they are.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from pipelines.plan import paths
from pipelines.plan.files import PlanFiles
from pipelines.write.set_files import SetFiles, listed_by
from shardset.errors import ConfigError, ManifestError, NotFound, StorageError, TransientError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.format.manifest import Manifest
from shardset.program import count
from shardset.storage.base import Stat, Storage, try_to_delete
from shardset.storage.many import in_order

Kept = dict[str, StorageError]
"""Why files are still there that nothing needs any more, by their names."""


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
    manifest, storage = loaded.manifest, loaded.storage
    newest = manifest_at(storage, naming.MANIFEST)
    if newest is None or newest.digest != manifest.digest:
        advice = f"only the newest version can be changed; give {storage.url}"
        raise ConfigError(f"{url}: is version {manifest.number}, and {advice}")
    return manifest, storage


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
    stats = list(existing(files.output, names))
    if stats:
        files.check_current()
    return delete_all(files.output, stats)


def remove_replaced(files: PlanFiles) -> Kept:
    """Removes the files of the set that a build has replaced, and last the file that names them,
    so that a rerun can continue.
    """
    output, content = files.output, files.find(paths.REPLACED)
    if content is None:
        return {}
    old = manifests.parse(bytes(content), f"{output.url}/{paths.REPLACED}")
    listed = listed_by(old, *manifests.older(output))
    return (
        delete_all(output, SetFiles(output).of_stopped_compactions(old.number + 1))
        or remove(files, listed | {naming.REPORT})  # the report is about the old set
        or remove(files, {stat.name for stat in output.list(versions.FOLDER)})
        or remove(files, {paths.REPLACED})
    )


def existing(output: Storage, names: Collection[str]) -> Iterator[Stat]:
    """The existing files among `names`; lists only their folders."""
    listed = " "
    for folder in sorted({f"{name.rpartition('/')[0]}/" for name in names if "/" in name}):
        if not folder.startswith(listed):
            yield from (stat for stat in output.list(folder) if stat.name in names)
            listed = folder
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
    errors = in_order(output.reads_at_once, stats, delete)
    return {stat.name: error for stat, error in zip(stats, errors, strict=True) if error}


def note_on(kept: Kept) -> list[str]:
    """A sentence on files that could not be removed; none without any."""
    if not kept:
        return []
    what = f"{count(len(kept), 'file')} that nothing needs any more"
    return [f"{what} can't be removed and stay: {next(iter(kept.values()))}"]


def _real_path(storage: Storage) -> str:
    """The folder without symbolic links."""
    return storage.url if storage.is_remote else os.path.realpath(storage.url).rstrip("/")
