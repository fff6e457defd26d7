"""The JSON records below `plan/`: what is built, what is planned, and what is finished.

The names of the fields are part of digests: a renamed field gives every set another plan digest.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from pipelines.plan.layout import SplitPlan, units_per_batch
from pipelines.plan.partitions import ByteRange
from shardset.format.manifest import ClassInfo, Shard

PLAN_VERSION = 8
"""Raised whenever a file below `plan/` changes, or what the same input and options lead to: which samples are held out,
the default sizes. A build that another version left unfinished then starts over."""


class BuildFile(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/build.json`: what an unfinished build must agree with to be resumed.

    `libraries` are the installed ones, whether or not a byte depends on them. A build that replaces others is not
    `ready` until their files are removed; `before` are their suffixes.
    """

    tool: str
    libraries: dict[str, str] = {}
    options: dict[str, Any]
    survey: str
    num_units: int
    suffix: str
    classes: list[ClassInfo] | None
    notes: list[str]
    ready: bool = True
    before: list[str] = []

    @property
    def digest(self) -> str:
        """What tells this build from another one at the same output: 16 hexadecimal digits."""
        identity = msgspec.structs.replace(self, notes=[], ready=True, before=[])
        return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]

    def differences_from(self, old: "BuildFile", *, writes_images: bool) -> list[str]:
        """In which words this build differs from an older one; empty if it can go on with it.

        Suffix and notes may differ: no byte of a shard depends on them. So may the libraries, unless the old build
        `writes_images`.
        """
        return [
            *_differences(old.options, self.options, "{} was {!r} and is {!r}"),
            *self._differences_of_tool(old, writes_images=writes_images),
            *self._differences_of_input(old),
        ]

    def _differences_of_tool(self, old: "BuildFile", *, writes_images: bool) -> Iterable[str]:
        if old.tool != self.tool:
            return [f"it was begun by {old.tool}, this is {self.tool}"]
        return _differences(old.libraries, self.libraries, "{} was {} and is {}") if writes_images else []

    def _differences_of_input(self, old: "BuildFile") -> Iterable[str]:
        if old.survey != self.survey:
            return ["the input is not the same (names, labels, sizes or generations changed)"]
        before, now = old.classes or [], self.classes or []
        return [_difference_of_classes(before, now)] if before != now else []


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/plan.json`: the arithmetic of every split and what the manifest repeats of the plan.

    Workers get it without its `classes`: Beam counts the bytes of all its objects in each step and process.
    `rejected` is the whole list of rejected samples.
    """

    digest: str
    source_digest: str
    num_classes: int
    classes: list[ClassInfo]
    splits: dict[str, SplitPlan]
    fixes: dict[str, int]
    num_rejected: int
    rejected: ByteRange
    num_units: int
    notes: list[str]

    @property
    def units_per_batch(self) -> int:
        """How many neighbouring units one worker assigns together."""
        return units_per_batch(self.num_units, self.splits.values())

    def units_of(self, batch: int) -> range:
        """The units of one batch."""
        size = self.units_per_batch
        return range(batch * size, min(self.num_units, (batch + 1) * size))


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/done/...`: a finished shard. Its `first_id` is 0 here; the commit counts it."""

    split: str
    number: int
    plan_digest: str
    num_content_bytes: int
    fields: list[str]
    shard: Shard


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], sentence: str) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield sentence.format(name, old.get(name), new.get(name))


def _difference_of_classes(old: list[ClassInfo], new: list[ClassInfo]) -> str:
    if len(old) != len(new):
        return f"there were {len(old)} classes and are {len(new)}"
    before, now = next((before, now) for before, now in zip(old, new, strict=True) if before != now)
    if before.name == now.name:
        return f"class {before.name!r} had the WordNet id {before.wnid} and has {now.wnid}"
    return f"class {before.label} was {before.name!r} and is {now.name!r}"
