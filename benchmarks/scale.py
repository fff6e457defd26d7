"""How planning grows: its steps on synthetic references, each in a process of its own.

python -m benchmarks.scale [--n 100000,1000000,10000000]

The functions are those of the build; only the raw files are not there. `--n 1e9` takes some ten minutes. Steps that
treat a unit, a batch of units, a bucket or a group alone are run on a few of them, because one is as large as another;
the column of measured references says on how many. What sees all units or all shards is run in full.
"""

import argparse
import json
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from pipelines import planning, tables
from pipelines.assigning import assign_units, find_twins, plan_shards
from pipelines.committing import make_manifest
from pipelines.config import BuildConfig
from pipelines.indexing import summarize
from pipelines.job import Job, PlanFile, put
from pipelines.planning import Sizing, SplitPlan, UnitStart, UnitSummary, plan_split
from pipelines.sources.folder import Folder
from pipelines.transforms import num_buckets
from pipelines.writing import ShardRecord
from shardset import manifest as manifests
from shardset import naming
from shardset.manifest import ClassInfo, IndexFile, Shard
from shardset.permutation import derive_key, hash64, hash_text, unpermute
from shardset.storage import MemoryStorage, Stat

UNIT_SAMPLES = 10_000
SAMPLE_BYTES = 100_000
NUM_CLASSES = 1_000
SIZES = (100_000, 1_000_000, 10_000_000)
SOME_UNITS = 20
"""How many units stand for all where a step treats each alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of planning: how many references were treated, how many objects or elements it makes of all."""

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


def plan_of(n: int) -> SplitPlan:
    """One split of `n` samples of 100 KB in shards of the default size."""
    return plan_split(
        "train", {0: n}, num_bytes=n * SAMPLE_BYTES, fields=["jpg", "cls"], sizing=Sizing(), balance="none"
    )


def num_units(n: int) -> int:
    """How many units of raw input hold `n` samples."""
    return -(-n // UNIT_SAMPLES)


def unit_table(unit: int) -> pa.Table:
    """What an inner tar of 10,000 images is indexed as."""
    names = [f"n{unit:08d}/n{unit:08d}_{row}" for row in range(UNIT_SAMPLES)]
    rows = [
        {
            "split": "train",
            "name": f"{name}.JPEG",
            "key": name,
            "label": unit % NUM_CLASSES,
            "image": "jpg",
            "fix": "",
            "crc32c": row,
            "fields": [
                {
                    "field": "jpg",
                    "object": "train.tar",
                    "generation": "1700000000000000",
                    "offset": (unit * UNIT_SAMPLES + row) * (SAMPLE_BYTES + 512),
                    "num_bytes": SAMPLE_BYTES,
                    "data": None,
                },
                {
                    "field": "cls",
                    "object": None,
                    "generation": None,
                    "offset": None,
                    "num_bytes": 3,
                    "data": b"%03d" % (unit % NUM_CLASSES),
                },
            ],
        }
        for row, name in enumerate(names)
    ]
    return tables.unit_table(rows, [])


def summarise_units(n: int) -> tuple[int, int, int]:
    """An index of 10,000 samples to its summary; what a plan keeps of a unit is its table."""
    found = [unit_table(unit) for unit in range(min(SOME_UNITS, num_units(n)))]
    started()
    for unit, table in enumerate(found):
        summarize(table, unit)
        [hash_text(key, key=0) for key in table["key"].to_pylist()]
    return UNIT_SAMPLES * len(found), num_units(n), num_units(n) * len(tables.to_bytes(found[0]))


def plan_all(n: int) -> tuple[int, int, int]:
    """The counts of all units to the plan and to where each unit starts: the one step that sees all units."""
    template = summarize(unit_table(0), 0)
    started()
    summaries = [_renumbered(template, unit) for unit in range(num_units(n))]
    num_bytes = len(pickle.dumps(summaries))
    plan_split(
        "train", planning.sum_strata(summaries, "train"), num_bytes=n * SAMPLE_BYTES, fields=["jpg"],
        sizing=Sizing(), balance="none",
    )  # fmt: skip
    starts = planning.unit_starts(summaries, stratified=False)
    assert starts[-1]["train"].serial == UNIT_SAMPLES * (num_units(n) - 1)
    return n, len(summaries), num_bytes


def place_all(n: int) -> tuple[int, int, int]:
    """Every sample to its shard and rank, unit by unit: arithmetic alone."""
    plan = plan_of(n)
    labels = np.zeros(UNIT_SAMPLES, np.int64)
    started()
    for first in range(0, n, UNIT_SAMPLES):
        start = UnitStart(serial=first, strata={0: first})
        planning.place(labels[: n - first], start, plan, seed=0, stratified=False)
    return n, 0, 0


def assign_batches(n: int) -> tuple[int, int, int]:
    """Batches of neighbouring units: their references, cut by group and serialised as they go through the shuffle."""
    job, plan = job_of(n), plan_file(plan_of(n), num_units(n))
    at_once = planning.units_at_once(plan.num_units, plan.splits.values())
    units = range(min(num_units(n), max(1, SOME_UNITS // at_once) * at_once))
    for unit in units:
        put(job.output, naming.unit_path(unit), tables.to_bytes(unit_table(unit)))
    started()
    sizes = []
    for first in units[::at_once]:
        batch = [(unit, _start(unit), {}) for unit in units[first : first + at_once]]
        sizes += [len(tables.placed_to_bytes(part)) for _, part in assign_units(job, plan, batch)]
    share = num_units(n) / len(units)
    return UNIT_SAMPLES * len(units), round(len(sizes) * share), round(sum(sizes) * share)


def find_twins_in_bucket(n: int) -> tuple[int, int, int]:
    """One bucket of key hashes, the largest that a worker holds."""
    units = num_units(n)
    buckets = num_buckets(units)
    each = UNIT_SAMPLES // buckets
    parts = [
        (unit, np.stack([hash64(unit, np.arange(each)), np.arange(each, dtype=np.uint64)], axis=1))
        for unit in range(units)
    ]
    started()
    assert not find_twins(parts)
    return each * units, buckets, 16 * n


def plan_group(n: int) -> tuple[int, int, int]:
    """The references of the first group of shards, sorted and written: what a worker holds at once."""
    job, plan = job_of(n), plan_file(plan_of(n), num_units(n))
    split = plan.splits["train"]
    table = _group_table(split)
    started()
    numbers = list(plan_shards(job, split, [table]))
    num_bytes = sum(found.num_bytes for found in job.output.list())
    return len(table), split.num_shards, round(num_bytes / len(numbers) * split.num_shards)


def commit_all(n: int) -> tuple[int, int, int]:
    """The records of all shards to the manifest: the one step that sees all shards."""
    job, plan = job_of(n), plan_file(plan_of(n), num_units(n))
    split = plan.splits["train"]
    started()
    records = {("train", number): _record(split, number) for number in range(split.num_shards)}
    manifest = make_manifest(job, plan, records)
    return n, split.num_shards, len(manifests.to_json(manifest))


def survey_folder(n: int) -> tuple[int, int, int]:
    """The launching machine's listing of `n` files in class folders; kept whole until it is written."""
    source = Folder(_Listing(n))
    started()
    units = source.survey().units
    return n, len(units), sum(len(json.dumps(unit)) for unit in units[:3]) * len(units) // min(3, len(units))


STEPS: dict[str, Callable[[int], tuple[int, int, int]]] = {
    "survey_folder": survey_folder,
    "summarise_units": summarise_units,
    "find_twins_in_bucket": find_twins_in_bucket,
    "plan_all": plan_all,
    "place_all": place_all,
    "assign_batches": assign_batches,
    "plan_group": plan_group,
    "commit_all": commit_all,
}
"""Each returns how many references it treated, and the number and bytes of all objects or elements of that kind."""

AT_MOST = {"survey_folder": 1_000_000, "commit_all": 100_000_000}
"""Steps whose memory grows are measured up to here."""

_before = {"seconds": 0.0, "peak": 0}


def started() -> None:
    """Called by a step when its input is ready."""
    _before.update(seconds=time.process_time(), peak=_peak_bytes())


def run_step(name: str, n: int) -> Step:
    """One step in this process; the memory is what the peak grew by."""
    num_refs, num_objects, num_object_bytes = STEPS[name](n)
    return Step(
        name=name, num_refs=num_refs, num_objects=num_objects, num_object_bytes=num_object_bytes,
        seconds=max(1e-6, time.process_time() - _before["seconds"]), added_bytes=_peak_bytes() - int(_before["peak"]),
    )  # fmt: skip


def measure(name: str, n: int) -> Step:
    """One step in a process of its own, so that no step inherits the peak of another."""
    words = [sys.executable, "-m", "benchmarks.scale", "--n", str(n), "--step", name]
    return Step(**json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))


def steps_for(n: int) -> list[str]:
    """The steps that are measured at that size."""
    return [name for name in STEPS if n <= AT_MOST.get(name, n)]


def report(sizes: Sequence[int]) -> Iterator[str]:
    """The table of all steps, a Markdown line at a time."""
    yield "| samples | step | measured references | references/s a core | grew by, MiB | objects | bytes of them |"
    yield "|---|---|---|---|---|---|---|"
    for n in sizes:
        for name in steps_for(n):
            step = measure(name, n)
            yield (
                f"| {n:,} | {name} | {step.num_refs:,} | {step.rate:,.0f} | {step.added_bytes / 2**20:,.0f} "
                f"| {step.num_objects:,} | {step.num_object_bytes:,} |"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, or with --step one step as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", default=",".join(map(str, SIZES)), help="numbers of samples, separated by commas")
    parser.add_argument("--step", choices=sorted(STEPS), help="only that one, as JSON")
    args = parser.parse_args(argv)
    sizes = [int(float(text)) for text in args.n.split(",")]
    if args.step:
        step = run_step(args.step, sizes[0])
        print(json.dumps({name: getattr(step, name) for name in Step.__slots__}))
        return
    for line in report(sizes):
        print(line, flush=True)


def _record(split: SplitPlan, number: int) -> ShardRecord:
    """What a worker reports of a shard; the counts of 1,000 classes are most of it."""
    path, size = naming.shard_path("train", "train", number), split.shard_size(number)
    index = IndexFile(path=naming.index_path(path), num_bytes=150 * size, crc32c="AAAAAA==")
    shard = Shard(
        path=path, num_samples=size, num_bytes=size * SAMPLE_BYTES, crc32c="AAAAAA==", sha256=f"{number:064x}",
        first_id=0, index=index, class_counts=[size // NUM_CLASSES] * NUM_CLASSES,
    )  # fmt: skip
    return ShardRecord(
        split="train", number=number, plan_digest="", num_content_bytes=size * SAMPLE_BYTES, fields=["jpg", "cls"],
        shard=shard,
    )  # fmt: skip


def job_of(n: int) -> Job:
    """A build whose output is empty memory."""
    output = MemoryStorage(f"scale-{n}")
    config = BuildConfig(source="folder", input="synthetic", output=output.url)
    return Job(config=config, source=Folder(output), output=output)


def plan_file(split: SplitPlan, units: int) -> PlanFile:
    """A plan with one split."""
    classes = [ClassInfo(label=label, name=str(label)) for label in range(NUM_CLASSES)]
    return PlanFile(
        digest="", source_digest="", classes=classes, splits={split.name: split}, fixes={}, num_rejected=0,
        num_units=units, spooled=False, notes=[],
    )  # fmt: skip


def _start(unit: int) -> dict[str, UnitStart]:
    serial = unit * UNIT_SAMPLES
    return {"train": UnitStart(serial=serial, strata={0: serial})}


def _group_table(plan: SplitPlan) -> pa.Table:
    """All references of group 0, by the inverse of what places them."""
    shards = np.arange(plan.num_shards)
    shards = shards[plan.group_of(shards) == 0]
    line = np.concatenate([np.arange(shard, plan.num_stored, plan.num_shards) for shard in shards.tolist()])
    source = unpermute(line, n=plan.num_stored, key=derive_key(0, "place", plan.name, 0))
    table = pa.concat_tables([unit_table(unit) for unit in range(num_units(len(line)))]).slice(0, len(line))
    columns = {
        "source": source,
        "copy": np.zeros(len(line), int),
        "shard": line % plan.num_shards,
        "rank": hash64(derive_key(0, "rank", plan.name), line),
    }
    return tables.place_rows(table, np.arange(len(line)), columns)


def _renumbered(template: UnitSummary, unit: int) -> UnitSummary:
    """A summary as it arrives from a worker: nothing shared with another."""
    count = planning.SplitCount(
        num_samples=UNIT_SAMPLES, num_rejected=0, num_bytes=UNIT_SAMPLES * SAMPLE_BYTES,
        strata={unit % NUM_CLASSES: UNIT_SAMPLES},
    )  # fmt: skip
    return UnitSummary(
        unit=unit, splits={"train": count}, fields={"train": ["jpg", "cls"]}, fixes={}, reasons=[],
        max_label=template.max_label, spooled=False, digest=f"{unit:064x}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Listing(MemoryStorage):
    """A storage that lists `num_files` files in 1,000 class folders and holds none."""

    name: str = "listing"
    num_files: int = 0

    def __init__(self, num_files: int) -> None:
        object.__setattr__(self, "name", "listing")
        object.__setattr__(self, "prefix", "")
        object.__setattr__(self, "num_files", num_files)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        each = -(-self.num_files // NUM_CLASSES)
        names = (f"train/n{label:08d}/n{label:08d}_{row}.JPEG" for label in range(NUM_CLASSES) for row in range(each))
        for name in islice(names, self.num_files):
            yield Stat(name=name, num_bytes=SAMPLE_BYTES, generation="1700000000000000", crc32c=None)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
