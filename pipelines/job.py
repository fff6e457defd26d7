"""A build as its workers see it: the configuration, the source, the output, and what the launching machine surveyed."""

import hashlib
import json
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from pipelines.config import BuildConfig
from pipelines.encoding import libraries
from pipelines.planning import SplitPlan, units_at_once
from pipelines.sources.base import Source, Survey, Unit
from shardset import naming
from shardset.errors import ConfigError, NotFound
from shardset.manifest import ClassInfo
from shardset.storage import Storage
from shardset.version import __version__

PLAN_VERSION = 5
"""Raised whenever what stands in `plan/` changes, so that a build that another version left unfinished starts over."""

START_OVER = (
    f"remove {naming.PLAN_FOLDER} at the output (and the shards there that no manifest lists), "
    "then build again with --overwrite"
)
"""What to do about a file of the plan that is damaged or missing."""

PIECE = 8 * 2**20
"""What is copied at once."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a worker needs; pickles. `suffix` keeps a set that replaces another out of its folders."""

    config: BuildConfig
    source: Source
    output: Storage
    suffix: str = ""

    def folder(self, split: str) -> str:
        """The folder of a split's shards."""
        return split + self.suffix


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/plan.json`: the arithmetic of every split and what the manifest repeats of the plan.

    Workers are handed it without its `classes`: Beam counts the bytes of all its objects in each step and process.
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

    @property
    def units_at_once(self) -> int:
        """How many units are a batch, treated together."""
        return units_at_once(self.num_units, self.splits.values())

    def units_of(self, batch: int) -> range:
        """The units of one batch."""
        at_once = self.units_at_once
        return range(batch * at_once, min(self.num_units, (batch + 1) * at_once))


class BuildFile(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/build.json`: what an unfinished build must agree with to be resumed.

    `libraries` are those at hand, whether or not a byte depends on them.
    """

    tool: str
    libraries: dict[str, str] = {}
    options: dict[str, Any]
    survey: str
    num_units: int
    suffix: str
    classes: list[ClassInfo] | None
    notes: list[str]


@dataclass(frozen=True, slots=True)
class UnitLine:
    """Where the survey keeps one unit: its number and its bytes in `plan/survey.jsonl`."""

    number: int
    start: int
    stop: int


def write_units(survey: Survey, file: IO[bytes]) -> tuple[str, list[UnitLine]]:
    """Writes the units as JSON lines, and returns their SHA-256 and where each unit's line stands."""
    hasher, places, start = hashlib.sha256(), [], 0
    for number, unit in enumerate(survey.units):
        line = json.dumps(unit, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        places.append(UnitLine(number, start, start + len(line)))
        start += len(line)
        hasher.update(line)
        file.write(line)
    return hasher.hexdigest(), places


def read_unit(output: Storage, line: UnitLine) -> Unit:
    """One unit of the survey."""
    return json.loads(output.read(naming.SURVEY, line.start, line.stop))


def describe_build(config: BuildConfig, survey: Survey, digest: str, suffix: str) -> BuildFile:
    """What this build would write into `plan/build.json`; `digest` is that of the survey's units."""
    return BuildFile(
        tool=f"shardset {__version__}, plan {PLAN_VERSION}",
        libraries=libraries(config.image),
        options=json.loads(json.dumps(config.what_decides_bytes())),
        survey=digest,
        num_units=len(survey.units),
        suffix=suffix,
        classes=survey.classes,
        notes=list(survey.notes),
    )


def differences(old: BuildFile, new: BuildFile, *, writes_images: bool) -> list[str]:
    """In which words two builds differ; suffix and notes, which no byte of a shard depends on, may differ.

    So may the libraries, unless the old build `writes_images`.
    """
    found = [
        f"{name} was {old.options.get(name)!r} and is {new.options.get(name)!r}"
        for name in sorted({*old.options, *new.options})
        if old.options.get(name) != new.options.get(name)
    ]
    if old.tool != new.tool:
        found.append(f"it was begun by {old.tool}, this is {new.tool}")
    elif writes_images:
        found += [
            f"{name} was {old.libraries.get(name)} and is {new.libraries.get(name)}"
            for name in sorted({*old.libraries, *new.libraries})
            if old.libraries.get(name) != new.libraries.get(name)
        ]
    if old.survey != new.survey:
        found.append("the input is not the same (names, sizes or generations changed)")
    elif (was := old.classes or []) != (now := new.classes or []):
        found.append(_difference_of_classes(was, now))
    return found


def _difference_of_classes(old: list[ClassInfo], new: list[ClassInfo]) -> str:
    if len(old) != len(new):
        return f"there were {len(old)} classes and are {len(new)}"
    was, now = next((was, now) for was, now in zip(old, new, strict=True) if was != now)
    if was.name == now.name:
        return f"class {was.name!r} had the WordNet id {was.wnid} and has {now.wnid}"
    return f"class {was.label} was {was.name!r} and is {now.name!r}"


def read_record(output: Storage, name: str, kind: type) -> Any:
    """A JSON record of the plan as `kind`; None if it is not there; ConfigError if it is not readable."""
    try:
        data = output.read(name)
    except NotFound:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{output.url}/{name}: not readable ({error}); it is damaged or of another version: {START_OVER}"
        ) from error


def put(output: Storage, name: str, data: bytes | memoryview, *, if_generation: str | None = None) -> None:
    """One whole object."""
    with output.writer(name, if_generation=if_generation) as out:
        out.write(data)


def copy(output: Storage, name: str, to: str) -> None:
    """One object under another name, a piece after the other."""
    num_bytes = output.stat(name).num_bytes
    with output.writer(to) as out:
        for start in range(0, num_bytes, PIECE):
            out.write(output.read(name, start, min(start + PIECE, num_bytes)))
