"""The steps of a build that count what they do: the same in the Beam pipeline and without Beam."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from pipelines.plan.index import index_unit
from pipelines.plan.plan_records import Build, PlanFile
from pipelines.plan.references import Slot
from pipelines.plan.summaries import UnitSummary
from pipelines.plan.survey import UnitRef
from pipelines.write.commit import commit
from pipelines.write.shard import write_shard

Counts = dict[int, int]
"""Samples by label."""

Finished = tuple[str, tuple[int, bytes, Counts]]
"""A split, and of one of its shards the number, the record and the samples."""

Count = Callable[[str, int], None]
"""Adds a number to the counter of that name."""


def index(build: Build, unit: UnitRef, count: Count) -> None:
    """Writes the table and the summary of a unit."""
    count_unit(index_unit(build, unit), count)


def count_unit(summary: UnitSummary, count: Count) -> None:
    """Counts the samples and the fixes of a unit."""
    for split in summary.splits.values():
        count("samples_indexed", split.num_samples)
        count("samples_quarantined", split.num_rejected)
    for fix, number in summary.fixes.items():
        count(f"fixed_{fix}", number)


def write(build: Build, plan: PlanFile, slot: Slot, count: Count) -> Finished:
    """Writes the tar, the index and the record of a shard; counts its samples by label."""
    split, number = slot
    written, labels, is_new = write_shard(build, plan, split, number)
    shard = written.shard
    count("shards_written" if is_new else "shards_skipped", 1)
    if is_new:
        count("samples_written", shard.num_samples)
        count("bytes_written", shard.num_bytes)
    record = msgspec.json.encode(written)
    return split, (number, record, dict(Counter(labels.tolist())))


def publish(
    build: Build,
    plan: PlanFile,
    records: Iterable[tuple[str, int, bytes]],
    class_totals: Mapping[str, Counts],
) -> str | None:
    """Publishes the manifest, if all shards are written; returns its digest.

    `records` are (split, number, record) of each shard.
    """
    by_split: dict[str, dict[int, bytes]] = {split: {} for split in plan.splits}
    for split, number, record in records:
        by_split[split][number] = record
    return commit(build, plan, by_split, class_totals)
