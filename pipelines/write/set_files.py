"""The files of a set by their names: which its versions list, which a build or a compaction may
have written, and which are left over.

A manifest or `plan/` names them all, or the name says which version was being compacted. Any other
file may belong to somebody else.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.plan_records import BuildFile, PlanFile
from shardset.errors import NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from shardset.storage.base import Stat, Storage

_OF_COMPACTION = re.compile(
    r"(plan/shards/)?[A-Za-z0-9_-]+(?P<suffix>-v(?P<base>[0-9]{1,9})-[0-9a-f]{8})[/.-]"
)
"""A file that a compaction of version `base` writes."""
_SHARD = re.compile(r"[A-Za-z0-9_-]+/[A-Za-z0-9_-]+-[0-9]{6,}\.(tar|parquet)", re.ASCII)
_PLAN = re.compile(
    r"plan/((build|plan|replaced|base)\.json|survey\.jsonl|known\.arrow|"
    r"(units|summaries|dropped|spool|shards|done|groups)/"
    r"[A-Za-z0-9_-]+\.(arrow|json|jsonl|bin))",
    re.ASCII,
)


def is_shard(name: str) -> bool:
    """Whether a file is called like a tar or an index of ours."""
    return _SHARD.fullmatch(name) is not None


def is_plan(name: str) -> bool:
    """Whether a file is called like one of a plan."""
    return _PLAN.fullmatch(name) is not None


def listed_by(*versions: Manifest) -> set[str]:
    """The files that some versions list; reads none."""
    groups = [group for manifest in versions for group in manifest.groups]
    tars = [group.path(number) for group in groups for number in range(group.num_shards)]
    quarantines = {manifest.quarantine.path for manifest in versions}
    return quarantines.union((group.table for group in groups), tars, map(naming.index_path, tars))


@dataclass(frozen=True, slots=True)
class SetFiles:
    """The files at the address of a set."""

    storage: Storage

    def unlisted(self, names: Collection[str]) -> set[str]:
        """Those of `names` that no version lists; reads no more versions than that takes."""
        left, older = set(names), manifests.older(self.storage)
        with suppress(NotFound):  # before the first one is published
            if left:
                left -= listed_by(manifests.read_head(self.storage))
        while left and (version := next(older, None)):
            left -= listed_by(version)
        return left

    def unfinished(self) -> set[str]:
        """The files that the build in `plan/` may have written, and the files of the set that
        it replaces.
        """
        names, output = set[str](), self.storage
        if file := plan_files.find(output, paths.REPLACED):
            where = f"{output.url}/{paths.REPLACED}"
            names = listed_by(manifests.parse(bytes(file.content), where))
        build = plan_files.find_record(output, paths.BUILD, BuildFile)
        plan = plan_files.find_record(output, paths.PLAN, PlanFile)
        if not build or not plan:
            return names
        for suffix in {build.suffix, *build.before}:
            names.add(naming.quarantine_path(suffix))
            for split, sizes in plan.splits.items():
                numbers = range(sizes.num_shards)
                tars = [naming.shard_path(split + suffix, split, number) for number in numbers]
                names.update(
                    tars, map(naming.index_path, tars), [naming.table_path(split + suffix)]
                )
        return names

    def plan(self, listed: Collection[str] = ()) -> set[str]:
        """The files of the plan, without those by which `repair` writes listed shards again."""
        names = {stat.name for stat in self.storage.list(naming.PLAN_FOLDER)}
        kept = names.intersection(map(paths.references_path, listed))
        files = set(filter(is_plan, names)) - kept
        return {name for name in files if not (kept and name.startswith(paths.GROUPS))}

    def of_stopped_compactions(self, number: int) -> Iterator[Stat]:
        """What compactions of versions before `number` left: they can't publish any more."""
        made: dict[str, list[Stat]] = {}
        for stat in self.storage.list():
            match = _OF_COMPACTION.match(stat.name)
            if match and int(match["base"]) < number:
                made.setdefault(match["suffix"], []).append(stat)
        unlisted = self.unlisted({stat.name for stats in made.values() for stat in stats})
        return chain(
            *(stats for stats in made.values() if unlisted.issuperset(stat.name for stat in stats))
        )

    def shards_of(self, split: str) -> set[str]:
        """The tars and indexes in the folders of a split, also of other builds."""
        folder = rf"{split}(-(v[0-9]+-)?[0-9a-f]{{8}})?"
        is_shard_of = re.compile(rf"{folder}/.*\.(tar|parquet)").fullmatch
        return {stat.name for stat in self.storage.list(split) if is_shard_of(stat.name)}

    def strays(self, names: Collection[str]) -> set[str]:
        """Those of `names` that no version lists, and that the build in `plan/` has not written."""
        unlisted = self.unlisted(names)
        return unlisted - self.unfinished() if unlisted else unlisted

    def old_columns(self, listed: Collection[str]) -> set[str]:
        """The folders of columns with tars that no version lists."""
        folder = naming.COLUMNS_FOLDER
        tars = (stat.name for stat in self.storage.list(folder) if stat.name.endswith(".tar"))
        parts = [tar.removeprefix(folder).partition("/") for tar in tars]
        return {f"{folder}{column}/" for column, _, tar in parts if tar and tar not in listed}
