"""The JSON records below `plan/`: the build, its plan, and its finished shards.

Digests cover the names of the fields: a renamed field changes the plan digest of every set.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pipelines.config import BuildConfig
from pipelines.images.options import ImageOptions
from pipelines.plan.append import Addition
from pipelines.plan.files import PlanFiles
from pipelines.plan.layout import SplitPlan
from pipelines.sources.base import Source
from shardset.format.manifest import ClassInfo
from shardset.format.write import WrittenShard
from shardset.prepared import prepared
from shardset.settings import value_text

PLAN_VERSION = 17
"""Increase it when the format of a file below `plan/` changes, or what the same input and options
lead to, such as the held-out samples or the default sizes: unfinished builds of other versions then
start over.
"""


@prepared
class BuildFile(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/build.json`: the identity of a build.

    An unfinished build resumes only if it is the same.

    `appends` says to what it adds, None if it makes a new set. `libraries` are the installed
    ones, whether or not a byte depends on them. A build that replaces others becomes `ready` once
    their files are removed; `before` holds their suffixes, and later only its own if they had that
    too. `claim` is the launcher that prepared the output: of several with one command, one does.
    `looked_for` is the survey's. It has `failed` if that was before its first shard.
    """

    tool: str
    libraries: dict[str, str] = {}
    options: dict[str, Any]
    survey: str
    num_units: int
    suffix: str
    classes: list[ClassInfo] | None
    notes: list[str]
    looked_for: str = ""
    ready: bool = True
    failed: bool = False
    before: list[str] = []
    appends: Addition | None = None
    claim: str = ""

    @property
    def digest(self) -> str:
        """The identity of the build at its output: 16 hexadecimal digits."""
        identity = msgspec.structs.replace(
            self, notes=[], looked_for="", ready=True, failed=False, before=[], claim=""
        )
        return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]

    @property
    def replaces(self) -> bool:
        """Whether another build wrote into the same folders before; its last files may still
        arrive.
        """
        return self.suffix in self.before

    def differences_from(self, old: "BuildFile", *, writes_images: bool) -> list[str]:
        """The differences from an older build, in words; empty if this build can resume it.

        Suffix and notes may differ: no byte of a shard depends on them. The libraries may differ
        too, unless the old build `writes_images`. Another input is named only where nothing else
        differs, which may be its cause.
        """
        differences = [*_differences(old.options, self.options)]
        if old.tool != self.tool:
            differences.append(f"it was begun by {old.tool}, this is {self.tool}")
        elif writes_images:
            differences += _differences(old.libraries, self.libraries)
        if not differences and _base_of(old) != _base_of(self):
            return ["the set has another version since"]
        if not differences and old.survey != self.survey:
            return ["the input is not the same (names, labels, sizes or generations changed)"]
        if not differences and old.classes != self.classes:
            return ["the input has other classes"]
        return differences


@dataclass(frozen=True, kw_only=True)
class Build:
    """A build as its steps see it: what was asked for, where the samples are, the files of the
    plan, and what `plan/build.json` says of it; pickles.

    `file` has no classes, because a million would take longer to travel than the images; an input
    that names its classes has `num_classes`. A build that `resumes` finds shards that it has
    finished.
    """

    config: BuildConfig
    source: Source
    files: PlanFiles
    file: BuildFile
    num_classes: int | None = None
    resumes: bool = False


@prepared
class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/plan.json`: the arithmetic of every split, and the fields that the manifest copies.

    Workers get the plan without `classes`, because Beam measures the size of each element in every
    step and process.
    """

    digest: str
    source_digest: str
    num_classes: int
    classes: list[ClassInfo]
    splits: dict[str, SplitPlan]
    fixes: dict[str, int]
    num_rejected: int
    num_units: int
    notes: list[str]


@prepared
class GroupFile(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/groups/...`: how to write the shards of a build again by their references.

    `input` is the folder of the raw objects. `build` has no classes. `fields` has the fields of
    each split, in the order of its indexes.
    """

    input: str
    image: ImageOptions
    build: BuildFile
    fields: dict[str, list[str]]


@prepared
class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/done/...`: a finished shard. The `first_id` of its shard is 0."""

    plan_digest: str
    written: WrittenShard


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield (
                f"{name} was {value_text(old.get(name)) or 'none'} and is"
                f" {value_text(new.get(name)) or 'none'}"
            )


def _base_of(build: BuildFile) -> str | None:
    return build.appends.base if build.appends else None
