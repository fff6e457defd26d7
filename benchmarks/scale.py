"""Measures how planning grows: every step on synthetic references, each in a separate process.

python -m benchmarks.scale [--n 100000,1000000,10000000]

The functions are those of the build; only the raw files are not there. `--n 1e9` takes some ten
minutes and 5 GB of the temporary folder. Steps that treat a unit, a batch of units, a bucket or a
group alone are run on a few of them, because one is as large as another; the column of measured
references says on how many. What sees all units or all shards is run in full.
"""

import itertools
import json
import os
import pickle
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.measuring import in_process, numbers, parser_of
from pipelines.config import BuildConfig, Sizing
from pipelines.plan import layout, paths, summaries, tables
from pipelines.plan.assign import assign_batch, plan_group
from pipelines.plan.duplicate_keys import KEY, find_duplicate_keys, spread_keys
from pipelines.plan.files import ByteRange, PlanFiles, write_slices
from pipelines.plan.frames import frame
from pipelines.plan.layout import SplitPlan, UnitOffset, plan_split
from pipelines.plan.records import BuildFile, PlanFile, ShardRecord
from pipelines.plan.summaries import (
    KnownCount,
    SplitCount,
    UnitOffsets,
    UnitSummary,
    read_summaries,
    summarize,
)
from pipelines.plan.survey import write_units
from pipelines.plan.tables import Content, UnitRow
from pipelines.sources.base import Extent
from pipelines.sources.folder import Folder
from pipelines.write.commit import Committer
from shardset.checksum import crc32c_of, crc32c_text
from shardset.format import naming
from shardset.format.manifest import ClassInfo, IndexFile, Shard
from shardset.format.write import WrittenShard
from shardset.order.permutation import derive_key, hash64, permute
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


def unit_rows(unit: int) -> list[UnitRow]:
    """The index rows of an inner tar of 10,000 images."""
    return [_row(unit, row) for row in range(UNIT_SAMPLES)]


def _row(unit: int, row: int) -> UnitRow:
    name = f"n{unit:08d}/n{unit:08d}_{row}"
    start = (unit * UNIT_SAMPLES + row) * (SAMPLE_BYTES + 512)
    image = Extent("train.tar", "1700000000000000", start, SAMPLE_BYTES, row)
    return UnitRow(
        split="train", name=f"{name}.JPEG", key=name, label=unit % NUM_CLASSES, fix="",
        content=Content("jpg", [("jpg", image), ("cls", b"%03d" % (unit % NUM_CLASSES))]),
    )  # fmt: skip


def index_units(n: int) -> tuple[int, int, int]:
    """Sums up the rows of an index, makes them a table and writes it."""
    found = [unit_rows(unit) for unit in range(min(SOME_UNITS, num_units(n)))]
    started()
    sizes = [len(tables.unit_to_bytes(tables.unit_table(rows, []))) for rows in found]
    for unit, rows in enumerate(found):
        summarize(unit, rows, [], KnownCount())
    return UNIT_SAMPLES * len(found), num_units(n), num_units(n) * sizes[0]


def plan_all(n: int) -> tuple[int, int, int]:
    """The summaries of all units to the plan and to where each batch starts: the one step that sees
    all units.
    """
    split, files = plan_of(n), made_files(_summary)
    started()
    whole = summaries.merge(read_summaries(files, num_units(n)))
    assert whole.splits["train"].num_samples == UNIT_SAMPLES * num_units(n)
    size = layout.units_per_batch(num_units(n), [split])
    units = read_summaries(files, num_units(n))
    offsets = summaries.unit_offsets(units, ["train"], units_per_batch=size, stratified=True)
    num_bytes = [len(pickle.dumps(offset)) for offset in offsets]
    return n, len(num_bytes), sum(num_bytes)


def spread_batch(n: int) -> tuple[int, int, int]:
    """The key hashes of one batch of units, cut by bucket."""
    files, plan = files_of(n), plan_file(plan_of(n), num_units(n))
    units = put_units(files, plan)
    started()
    parts = spread_keys(files, plan, 0)
    share = num_units(n) / len(units)
    return UNIT_SAMPLES * len(units), round(len(parts) * share), 16 * n


def find_duplicates_in_bucket(n: int) -> tuple[int, int, int]:
    """One bucket of key hashes, all different."""
    files, plan = files_of(n), plan_file(plan_of(n), num_units(n))
    buckets = layout.num_buckets(plan.splits.values())
    keys = np.zeros(n // buckets, KEY)
    keys["hash"] = hash64(7, np.arange(len(keys)))
    per_part = max(1, len(keys) // -(-num_units(n) // plan.units_per_batch))
    parts = [
        part
        for first in range(0, len(keys), per_part)
        for _, part in write_slices(
            files, f"part-{first}", [(0, keys[first : first + per_part].tobytes())]
        )
    ]
    started()
    assert not find_duplicate_keys(files, plan, 0, parts)
    return len(keys), buckets, 16 * n


def assign(n: int) -> tuple[int, int, int]:
    """A batch of units: read, placed, cut by group of shards and written for the groups."""
    files, plan = files_of(n), plan_file(plan_of(n), num_units(n))
    units = put_units(files, plan)
    started()
    parts = assign_batch(files, plan, 0, _offsets(0), [], seed=0, stratified=False)
    share = num_units(n) / len(units)
    num_bytes = sum(part.stop - part.start for _, part in parts)
    return UNIT_SAMPLES * len(units), round(len(parts) * share), round(num_bytes * share)


def gather_group(n: int) -> tuple[int, int, int]:
    """The references of the first group of shards: read from all batches, sorted and written, shard
    by shard.
    """
    files, plan = files_of(n), plan_file(plan_of(n), num_units(n))
    split = plan.splits["train"]
    num_batches = -(-plan.num_units // plan.units_per_batch)
    parts, num_refs = put_group(files, split, num_batches)
    started()
    numbers = list(plan_group(files, split, parts))
    num_bytes = sum(found.num_bytes for found in files.output.list(naming.PLAN_FOLDER + "shards/"))
    return num_refs, split.num_shards, round(num_bytes / len(numbers) * split.num_shards)


def commit_all(n: int) -> tuple[int, int, int]:
    """The records of all shards to their table and the manifest."""
    plan = plan_file(plan_of(n), num_units(n))
    split = plan.splits["train"]
    with tempfile.TemporaryDirectory() as folder:
        committer = committer_of(split, folder)
        started()
        committer.write_manifest(
            plan, {"train": dict.fromkeys(range(NUM_CLASSES), n // NUM_CLASSES)}
        )
        return n, split.num_shards, os.path.getsize(os.path.join(folder, naming.MANIFEST))


def survey_folder(n: int) -> tuple[int, int, int]:
    """The launching machine's listing of `n` files in class folders, until it can be written."""
    source = Folder(_Listing("listing", num_files=n))
    started()
    with tempfile.TemporaryFile() as file:
        written = write_units(source.survey().units, file)
        return n, written.num_units, written.blocks[-1].stop


PLANNING = (plan_all, spread_batch, find_duplicates_in_bucket, assign, gather_group)
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


def committer_of(split: SplitPlan, folder: str) -> Committer:
    """What publishes a set in a folder; the records of its shards are made when they are read."""

    def record(number: int) -> ShardRecord:
        size = split.shard_size(number)
        shard = shard_of(number, size, num_bytes=size * SAMPLE_BYTES, index_bytes=90 * size)
        written = WrittenShard(shard, ["jpg", "cls"], shard.num_bytes)
        return ShardRecord(plan_digest=DIGEST, written=written)

    config = BuildConfig(source="folder", input="synthetic", output=folder)
    return Committer(made_files(record, folder), config, A_BUILD, folder)


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


def files_of(n: int) -> PlanFiles:
    """The plan files of a build whose output is memory, which belongs to it."""
    files = PlanFiles(MemoryStorage(f"scale-{n}"), build="")
    files.write(paths.BUILD, b"")
    return files


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


def put_units(files: PlanFiles, plan: PlanFile) -> range:
    """The indexes of the units of the first batch, in the output."""
    units = plan.units_of(0)
    for unit, table in zip(units, unit_tables(len(units)), strict=True):
        files.write(paths.unit_path(unit), tables.unit_to_bytes(table))
    return units


def unit_tables(num_units: int) -> Iterator[pa.RecordBatch]:
    """The tables of some units: that of the first with other names."""
    first = tables.unit_table(unit_rows(0), [])
    columns = dict(zip(first.schema.names, first.columns, strict=True))
    for unit in range(num_units):
        named = pc.replace_substring(first["row"], b"n00000000", f"n{unit:08d}".encode())
        keys = hash64(unit, np.arange(len(first)))
        yield pa.RecordBatch.from_pydict(columns | {"row": named, "key_hash": keys}, first.schema)


def put_group(files: PlanFiles, plan: SplitPlan, num_batches: int) -> tuple[list[ByteRange], int]:
    """All references of group 0, of scattered samples, a part from each batch; and how many they
    are.
    """
    shards = np.arange(plan.num_shards)
    shards = shards[plan.group_of(shards) == 0]
    line = np.concatenate(
        [np.arange(shard, plan.num_stored, plan.num_shards) for shard in shards.tolist()]
    )
    source = permute(line, n=plan.num_stored, key=derive_key(0, "place", plan.name, 0))
    line, source = line[np.argsort(source)], np.sort(source)
    raw = tables.concat(list(unit_tables(num_units(len(line))))).slice(0, len(line))
    none = np.zeros(len(line), np.int32)
    columns = {
        "row": raw["row"],
        "occurrence": none,
        "source": source,
        "copy": none,
        "shard": line % plan.num_shards,
        "rank": hash64(derive_key(0, "rank", plan.name), line),
    }
    placed = pa.RecordBatch.from_pydict(columns, tables.PLACEMENT)
    bounds = np.linspace(0, len(line), num_batches + 1).astype(int).tolist()
    parts = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        piece = tables.placements_to_bytes(placed.slice(start, stop - start))
        parts += write_slices(files, paths.slice_path("references", number), [(0, piece)])
    return [part for _, part in parts], len(line)


def _offsets(unit: int) -> UnitOffsets:
    serial = unit * UNIT_SAMPLES
    return {"train": UnitOffset(serial=serial, strata={0: serial})}


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
    """A storage that holds nothing: what is read is made, as JSON, from the last number in its
    name; what is written goes to a folder of the disk.
    """

    make: Callable[[int], Any] = int
    folder: str = ""

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        content = b""
        if name != paths.BUILD:
            content = msgspec.json.encode(self.make(int(re.findall(r"[0-9]+", name)[-1])))
        return content + frame("", content)

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        return LocalStorage(self.folder).writer(name, if_generation=if_generation)


def made_files(make: Callable[[int], Any], folder: str = "") -> PlanFiles:
    """The plan files of a build whose output holds, as JSON, what `make` gives for a number."""
    return PlanFiles(_Made("made", make=make, folder=folder), build="")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
