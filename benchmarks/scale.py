"""Measures how planning grows: every step on synthetic references, each in a separate process.

python -m benchmarks.scale [--n 100000,1000000,10000000]

The functions are those of the build; only the raw files are not there. `--n 1e9` takes some ten
minutes and 5 GB of the temporary folder. Steps that treat a unit or a group alone are run on a few
of them, because one is as large as another; the column of measured references says on how many.
What sees all units or all shards is run in full.
"""

import itertools
import json
import os
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np

from benchmarks.measuring import in_process, numbers, parser_of
from pipelines.config import BuildConfig, Sizing
from pipelines.plan import paths, summaries, tables
from pipelines.plan.files import PlanFiles, frame
from pipelines.plan.layout import SplitPlan, plan_split
from pipelines.plan.plan_records import Build, BuildFile, PlanFile
from pipelines.plan.planner import number_duplicates
from pipelines.plan.references import write_references
from pipelines.plan.summaries import KnownCount, SplitCount, UnitSummary, read_summaries, summarize
from pipelines.plan.survey import write_units
from pipelines.plan.tables import SampleRow
from pipelines.sources.base import Extent
from pipelines.sources.folder import Folder
from pipelines.write.commit import write_manifest
from shardset.checksum import crc32c_of, crc32c_text
from shardset.format import naming
from shardset.format.manifest import ClassInfo, IndexFile, Shard
from shardset.format.write import WrittenShard
from shardset.order.permutation import hash64
from shardset.storage.base import ObjectWriter, Stat
from shardset.storage.local import LocalStorage
from shardset.storage.memory import MemoryStorage

UNIT_SAMPLES = 10_000
SAMPLE_BYTES = 100_000
NUM_CLASSES = 1_000
DIGEST = "0" * 64
SIZES = (100_000, 1_000_000, 10_000_000)
A_BUILD = BuildFile(tool="", options={}, survey="", num_units=0, suffix="", classes=None, notes=[])
SOME_UNITS = 20
"""How many units stand for all where a step treats each alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of planning: how many references were treated, how many objects or elements it makes
    of all.

    `seconds` are processor time in a fresh process.
    """

    name: str
    num_refs: int
    num_objects: int
    num_object_bytes: int
    seconds: float
    added_bytes: int

    @property
    def rate(self) -> float:
        """References a second on one core."""
        return self.num_refs / self.seconds


def plan_of(n: int, num_shards: int | None = None) -> SplitPlan:
    """One split of `n` samples of 100 KB, in shards of the default size or in so many."""
    return plan_split(
        "train", {0: n}, num_bytes=n * SAMPLE_BYTES, fields=["jpg", "cls"],
        sizing=Sizing(num_shards=num_shards), balance="none",
    )  # fmt: skip


def num_units(n: int) -> int:
    """How many units of raw input hold `n` samples."""
    return -(-n // UNIT_SAMPLES)


def unit_rows(unit: int) -> list[SampleRow]:
    """The index rows of an inner tar of 10,000 images."""
    return [_row(unit, row) for row in range(UNIT_SAMPLES)]


def _row(unit: int, row: int) -> SampleRow:
    name = f"n{unit:08d}/n{unit:08d}_{row}"
    start = (unit * UNIT_SAMPLES + row) * (SAMPLE_BYTES + 512)
    image = Extent("train.tar", "1700000000000000", start, SAMPLE_BYTES, row)
    return SampleRow(
        split="train", name=f"{name}.JPEG", key=name, label=unit % NUM_CLASSES, fix="",
        image="jpg", fields=[("jpg", image), ("cls", b"%03d" % (unit % NUM_CLASSES))],
    )  # fmt: skip


def index_units(n: int) -> tuple[int, int, int]:
    """Sums up the rows of an index, makes them a table and writes it."""
    found = [unit_rows(unit) for unit in range(min(SOME_UNITS, num_units(n)))]
    started()
    sizes = [len(tables.to_bytes(tables.unit_table(rows, []))) for rows in found]
    for unit, rows in enumerate(found):
        summarize(unit, rows, [], KnownCount())
    return UNIT_SAMPLES * len(found), num_units(n), num_units(n) * sizes[0]


def plan_all(n: int) -> tuple[int, int, int]:
    """The summaries of all units to the counts of the plan."""
    files = made_files(_summary)
    started()
    whole = summaries.merge(read_summaries(files, num_units(n)))
    assert whole.splits["train"].num_samples == UNIT_SAMPLES * num_units(n)
    return n, 1, 0


def find_duplicates(n: int) -> tuple[int, int, int]:
    """The hashes of the keys of all units, all different."""
    files = made_files(_other_unit)
    started()
    number_duplicates(files, num_units(n), n)
    return n, 1, 8 * n


def gather_group(n: int) -> tuple[int, int, int]:
    """The references of the first group of shards: gathered from the tables of all units, put in
    order and written, shard by shard.
    """
    plan = plan_file(plan_of(n), num_units(n))
    split = plan.splits["train"]
    with tempfile.TemporaryDirectory() as folder:
        build = build_of(_first_unit, folder)
        build.files.read(paths.unit_path(0))
        started()
        slots = write_references(build, plan, ("train", 0))
        stored = LocalStorage(folder).list(naming.PLAN_FOLDER)
        num_bytes = sum(found.num_bytes for found in stored) // len(slots)
    return n // split.num_groups, split.num_shards, num_bytes * split.num_shards


def commit_all(n: int) -> tuple[int, int, int]:
    """The records of all shards to their table and the manifest."""
    plan = plan_file(plan_of(n), num_units(n))
    split = plan.splits["train"]
    with tempfile.TemporaryDirectory() as folder:
        build = build_of(int, folder)
        started()
        written = {"train": written_shards(split)}
        write_manifest(
            build, plan, written, {"train": dict.fromkeys(range(NUM_CLASSES), n // NUM_CLASSES)}
        )
        return n, split.num_shards, os.path.getsize(os.path.join(folder, naming.MANIFEST))


def survey_folder(n: int) -> tuple[int, int, int]:
    """The launching machine's listing of `n` files in class folders, until it can be written."""
    source = Folder(_Listing("listing", num_files=n))
    started()
    with tempfile.TemporaryFile() as file:
        written = write_units(source.survey().units, file)
        return n, written.num_units, written.blocks[-1].stop


PLANNING = (plan_all, find_duplicates, gather_group)
"""What is done with every reference once it is indexed."""

STEPS = {step.__name__: step for step in (survey_folder, index_units, *PLANNING, commit_all)}
"""Each returns how many references it treated, and the number and bytes of all objects or elements
of that kind.
"""

AT_MOST = {"survey_folder": 10_000_000}
"""Steps that treat every file, and not only a part of them, are measured up to here."""

_before = {"seconds": 0.0, "peak": 0}


def started() -> None:
    """Called by a step when its input is ready."""
    _before.update(seconds=time.process_time(), peak=_peak_bytes())


def run_step(name: str, n: int) -> Step:
    """One step in this process; the memory is what the peak grew by."""
    num_refs, num_objects, num_object_bytes = STEPS[name](n)
    seconds = max(1e-6, time.process_time() - _before["seconds"])
    return Step(
        name=name,
        num_refs=num_refs,
        num_objects=num_objects,
        num_object_bytes=num_object_bytes,
        seconds=seconds,
        added_bytes=_peak_bytes() - int(_before["peak"]),
    )


def measure(name: str, n: int) -> Step:
    """One step in a separate process, so that no step inherits the peak of another."""
    return Step(**in_process("benchmarks.scale", "--n", str(n), "--step", name))


def report(sizes: Sequence[int]) -> Iterator[str]:
    """The table of all steps, a Markdown line at a time."""
    yield (
        "| samples | step | measured references | references/s a core | grew by, MiB | objects |"
        " bytes of them |"
    )
    yield "|---|---|---|---|---|---|---|"
    for n in sizes:
        per_ref = 0.0
        for name in (name for name in STEPS if n <= AT_MOST.get(name, n)):
            step = measure(name, n)
            per_ref += STEPS[name] in PLANNING and 1 / step.rate
            yield (
                f"| {n:,} | {name} | {step.num_refs:,} | {step.rate:,.0f} |"
                f" {step.added_bytes / 2**20:,.0f} | {step.num_objects:,} |"
                f" {step.num_object_bytes:,} |"
            )
        yield f"| {n:,} | planning in all | | {1 / per_ref:,.0f} | | | |"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, or with --step one step as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--n", default=",".join(map(str, SIZES)), help="numbers of samples, separated by commas"
    )
    parser.add_argument("--step", choices=sorted(STEPS), help="only that one, as JSON")
    args = parser.parse_args(argv)
    if args.step:
        print(json.dumps(asdict(run_step(args.step, *numbers(args.n)))))
        return
    for line in report(numbers(args.n)):
        print(line, flush=True)


def written_shards(split: SplitPlan) -> Iterator[WrittenShard]:
    """The shards of a split, each made when it is needed."""
    for number in range(split.num_shards):
        size = split.shard_size(number)
        shard = shard_of(number, size, num_bytes=size * SAMPLE_BYTES, index_bytes=90 * size)
        yield WrittenShard(shard, ["jpg", "cls"], shard.num_bytes)


def build_of(make: Callable[[int], Any], folder: str) -> Build:
    """A build in a folder whose plan holds what `make` gives for a number."""
    config = BuildConfig(source="folder", input="synthetic", output=folder)
    source = Folder(MemoryStorage("synthetic"))
    return Build(config=config, source=source, files=made_files(make, folder), file=A_BUILD)


def shard_of(
    number: int,
    size: int,
    *,
    num_bytes: int,
    index_bytes: int,
    crc32c: str = "AAAAAA==",
    footer: bytes = b"",
) -> Shard:
    """What a manifest says of a shard; `crc32c` and `footer` belong to its index."""
    path = naming.shard_path("train", "train", number)
    index = IndexFile(
        path=naming.index_path(path), num_bytes=index_bytes, crc32c=crc32c,
        footer_bytes=len(footer), footer_crc32c=crc32c_text(crc32c_of(footer)),
    )  # fmt: skip
    return Shard(
        path=path, num_samples=size, num_bytes=num_bytes, crc32c="AAAAAA==",
        sha256=f"{number:064x}", first_id=0, index=index,
    )  # fmt: skip


def plan_file(split: SplitPlan, units: int, num_classes: int = NUM_CLASSES) -> PlanFile:
    """A plan with one split."""
    return PlanFile(
        digest=DIGEST,
        source_digest=DIGEST,
        num_classes=num_classes,
        classes=[ClassInfo(label=label, name=f"class {label}") for label in range(num_classes)],
        splits={split.name: split},
        fixes={},
        num_rejected=0,
        num_units=units,
        notes=[],
    )


@cache
def _encoded() -> bytes:
    return bytes(tables.to_bytes(tables.unit_table(unit_rows(0), [])))


def _first_unit(_: int) -> bytes:
    """The table of a unit, the same for all: to make it takes no time."""
    return _encoded()


def _other_unit(unit: int) -> bytes:
    """The table of a unit with its own keys."""
    table = tables.from_bytes(_encoded(), tables.UNIT)
    keys = hash64(7, np.arange(unit * UNIT_SAMPLES, (unit + 1) * UNIT_SAMPLES))
    return bytes(tables.to_bytes(tables.with_columns(table, {"key_hash": keys}, tables.UNIT)))


def _summary(unit: int) -> UnitSummary:
    """What a worker writes of a unit in which all classes are mixed, the largest there is."""
    count = SplitCount(
        num_samples=UNIT_SAMPLES, num_rejected=0, num_bytes=UNIT_SAMPLES * SAMPLE_BYTES,
        strata=dict.fromkeys(range(NUM_CLASSES), UNIT_SAMPLES // NUM_CLASSES),
    )  # fmt: skip
    return UnitSummary(
        unit=unit,
        splits={"train": count},
        fields={"train": dict.fromkeys(("jpg", "cls"), UNIT_SAMPLES)},
        fixes={},
        reasons=[],
        known=KnownCount(),
        digest=f"{unit:064x}",
    )


@dataclass(frozen=True)
class _Listing(MemoryStorage):
    """A storage that lists `num_files` files in 1,000 class folders and holds none."""

    num_files: int = 0

    def list(self, prefix: str = "") -> Iterator[Stat]:
        each = -(-self.num_files // NUM_CLASSES)
        names = (
            f"train/n{label:08d}/n{label:08d}_{row}.JPEG"
            for label in range(NUM_CLASSES)
            for row in range(each)
        )
        for name in itertools.islice(names, self.num_files):
            yield Stat(
                name=name, num_bytes=SAMPLE_BYTES, generation="1700000000000000", crc32c=None
            )


@dataclass(frozen=True)
class _Made(MemoryStorage):
    """A storage that holds nothing: what is read is made, as bytes or JSON, from the last number in
    its name; what is written goes to a folder of the disk.
    """

    make: Callable[[int], Any] = int
    folder: str = ""

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        content = b""
        if name != paths.BUILD:
            made = self.make(int(re.findall(r"[0-9]+", name)[-1]))
            content = made if isinstance(made, bytes) else msgspec.json.encode(made)
        return content + frame("", content)

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        return LocalStorage(self.folder).writer(name, if_generation=if_generation)


def made_files(make: Callable[[int], Any], folder: str = "") -> PlanFiles:
    """The plan files of a build whose output holds what `make` gives for a number."""
    return PlanFiles(_Made("made", make=make, folder=folder), build="")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
