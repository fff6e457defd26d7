"""Writes damaged or missing shards of a set again, each by the plan of the build that made it.

A build leaves its plan at the output: the references of each shard, and how to read them
(GroupFile). What is written is compared with the manifest before it is stored.
"""

import io
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import cast

import msgspec

from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.files import PlanFiles
from pipelines.plan.plan_records import GroupFile
from pipelines.write.replace import newest_of
from pipelines.write.shard import PlannedSamples, is_stored
from shardset.errors import ChangedInput, NotFound, ShardsetError
from shardset.format import manifest as manifests
from shardset.format.manifest import IndexFile, Shard
from shardset.format.write import write_shard
from shardset.program import count
from shardset.storage.base import ObjectWriter, Storage
from shardset.storage.checked import facts_of
from shardset.storage.open import open_storage

NO_PLAN = "no build left its plan for it; restore the file from a copy"


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """The files that were written again, and why others could not be, by path."""

    url: str
    written: list[str]
    failed: dict[str, str]


def repair(url: str, input_url: str | None = None) -> Repaired:
    """Writes the tars and indexes again that are missing or not what the manifests of all versions
    list.

    `input_url` is where the raw input is now, if it has moved. Raises ManifestError or ConfigError
    for a set that can't be read or is no newest version.
    """
    newest, storage = newest_of(url)
    written: list[str] = []
    failed: dict[str, str] = {}
    seen = set[str]()
    for manifest in chain([newest], manifests.older(storage)):
        for name, split in manifests.opened(storage, manifest).splits.items():
            for shard in split.shards:
                files = [file for file in (shard, shard.index) if file.path not in seen]
                seen.update(file.path for file in files)
                damaged = [file for file in files if not is_stored(storage, file)]
                if not damaged:
                    continue
                try:
                    _rewrite(storage, name, shard, damaged, input_url)
                    written += [file.path for file in damaged]
                except ShardsetError as error:
                    failed |= {file.path: str(error) for file in damaged}
    return Repaired(url=storage.url, written=written, failed=failed)


def lines(done: Repaired) -> list[str]:
    """The result as lines for a terminal."""
    messages = [f"{path}: written again" for path in done.written]
    messages += [f"{path}: not repaired: {why}" for path, why in done.failed.items()]
    return [
        *messages,
        f"repair {done.url}: {count(len(done.written), 'file')} written again,"
        f" {len(done.failed):,} not repaired",
    ]


def _rewrite(
    storage: Storage,
    split: str,
    shard: Shard,
    damaged: list[Shard | IndexFile],
    input_url: str | None,
) -> None:
    """Writes the damaged files of a shard; raises a ShardsetError if that can't be."""
    file = plan_files.find(storage, paths.references_path(shard.path))
    group = plan_files.find(storage, paths.group_path(file.build)) if file else None
    if not file or not group:
        raise NotFound(NO_PLAN)
    name = paths.group_path(file.build)
    made = plan_files.decode_record(storage, name, group.content, GroupFile)
    files = PlanFiles(storage, file.build)
    source = open_storage(input_url or made.input)
    planned = PlannedSamples(files, source, made.image, made.build)
    samples = planned.read(split, shard.path, is_new=False)
    contents = defaultdict[str, io.BytesIO](io.BytesIO)

    def writer_of(path: str) -> AbstractContextManager[ObjectWriter]:
        return nullcontext(cast(ObjectWriter, contents[path]))

    write_shard(shard.path, samples, made.fields[split], writer_of)
    for listed in damaged:
        facts, expected = (
            facts_of(contents[listed.path].getvalue()),
            (listed.num_bytes, listed.crc32c),
        )
        if facts != expected:
            raise ChangedInput(
                f"{storage.url}/{listed.path}: would become {facts}, the manifest says {expected}:"
                " the input or a library has changed; restore the file from a copy"
            )
    for listed in damaged:
        storage.write(listed.path, contents[listed.path].getvalue())
