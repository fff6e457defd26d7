"""A build as its workers see it: the configuration, the source, the output, and what the launching machine surveyed."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from pipelines.config import BuildConfig
from pipelines.images.encode import libraries
from pipelines.plan import files
from pipelines.plan.files import START_OVER
from pipelines.plan.layout import SplitPlan, units_at_once
from pipelines.plan.partitions import ByteRange, read_part
from pipelines.sources.base import Source, Survey, Unit
from shardset.checksum import extend_crc32c
from shardset.errors import ConfigError, ManifestError, NotFound, PreconditionFailed, SourceError
from shardset.format import naming
from shardset.format.manifest import ClassInfo
from shardset.storage.base import Storage
from shardset.version import __version__

PLAN_VERSION = 6
"""Raised whenever what stands in `plan/` changes, so that a build that another version left unfinished starts over."""

_OF_ANOTHER_BUILD = (NotFound, PreconditionFailed, ConfigError, ManifestError, SourceError)
"""How it shows that another build has replaced or removed what this one wrote."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a worker needs; pickles. `suffix` keeps a set that replaces another out of its folders.

    `build` is the digest of what is built: every file of `plan/` carries it, and one that carries another is not used.
    """

    config: BuildConfig
    source: Source
    output: Storage
    suffix: str = ""
    build: str = ""

    def folder(self, split: str) -> str:
        """The folder of a split's shards."""
        return split + self.suffix

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Writes one whole file of the plan."""
        files.put(self.output, name, self.build, data)

    def read(self, name: str) -> memoryview:
        """A file of the plan that this build wrote; see planfiles.read."""
        return files.read(self.output, name, self.build)

    def find(self, name: str) -> bytes | memoryview | None:
        """A file of the plan; None if there is none, or one that another build left."""
        found = files.find(self.output, name)
        return found.content if found and found.build == self.build else None

    def check_place(self) -> None:
        """Raises ManifestError if the output is not this build's any more, because another one began there."""
        found = files.find(self.output, naming.BUILD)
        if found is None or found.build != self.build:
            raise files.another_build(self.output, naming.BUILD)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block that runs only while the output is this build's; what goes wrong because it is not is said so."""
        self.check_place()
        try:
            yield
        except _OF_ANOTHER_BUILD:
            self.check_place()
            raise

    def condition_of(self, name: str) -> str:
        """The generation that stands there, which this build may replace: what another writes later has another."""
        generation = files.generation_of(self.output, name)
        self.check_place()  # after the look: what was seen was there before any other build began
        return generation


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/plan.json`: the arithmetic of every split and what the manifest repeats of the plan.

    Workers are handed it without its `classes`: Beam counts the bytes of all its objects in each step and process.
    `rejected` is the list of rejected samples, all of it.
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
    def units_at_once(self) -> int:
        """How many units are a batch, treated together."""
        return units_at_once(self.num_units, self.splits.values())

    def units_of(self, batch: int) -> range:
        """The units of one batch."""
        at_once = self.units_at_once
        return range(batch * at_once, min(self.num_units, (batch + 1) * at_once))


class BuildFile(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/build.json`: what an unfinished build must agree with to be resumed.

    `libraries` are those at hand, whether or not a byte depends on them. A build that takes the place of others is not
    `ready` until what they left is gone; `before` are their suffixes.
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
        """What tells this build from another at the same output: 16 hexadecimal digits."""
        said = msgspec.structs.replace(self, notes=[], ready=True, before=[])
        return hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class UnitRef:
    """Where the survey keeps one unit: its number and its bytes in `plan/survey.jsonl`, with their CRC32C."""

    number: int
    start: int
    stop: int
    crc32c: int


def write_units(survey: Survey, file: IO[bytes]) -> tuple[str, list[UnitRef]]:
    """Writes the units as JSON lines, and returns their SHA-256 and where each unit's line stands."""
    hasher, places, start = hashlib.sha256(), [], 0
    for number, unit in enumerate(survey.units):
        line = json.dumps(unit, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        places.append(UnitRef(number, start, start + len(line), extend_crc32c(0, line)))
        start += len(line)
        hasher.update(line)
        file.write(line)
    return hasher.hexdigest(), places


def read_unit(output: Storage, line: UnitRef) -> Unit:
    """One unit of the survey."""
    return json.loads(read_part(output, ByteRange(naming.SURVEY, line.start, line.stop, line.crc32c)))


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


def record_of(output: Storage, name: str, data: bytes | memoryview, kind: type) -> Any:
    """A JSON record of the plan as `kind`; ConfigError if it is none."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{output.url}/{name}: not readable ({error}); it is damaged or of another version: {START_OVER}"
        ) from error


def read_record(output: Storage, name: str, kind: type) -> Any:
    """A JSON record of the plan, whichever build wrote it; None if it is not there."""
    found = files.find(output, name)
    return record_of(output, name, found.content, kind) if found else None


def put(output: Storage, name: str, data: bytes | memoryview, *, if_generation: str | None = None) -> None:
    """One whole object, as it is."""
    with output.writer(name, if_generation=if_generation) as out:
        out.write(data)
