"""Runs the steps of a build in this process, one after the other and without Beam: for an input
that is built before Beam has started.
"""

import os
from collections import Counter
from collections.abc import Sequence

from pipelines import build_steps
from pipelines.plan import tables
from pipelines.plan.plan_records import Build
from pipelines.plan.planner import make_plan
from pipelines.plan.references import groups_of, write_references
from pipelines.plan.survey import UnitRef, units_in

BYTES_PER_WORKER = 16 << 20
"""An input of fewer bytes is read sooner than a worker process starts."""


def num_workers(num_units: int, num_bytes: int, most: int | None = None) -> int:
    """How many worker processes an input is worth; at most one per core, or `most`."""
    worth = max(num_units, 1 + num_bytes // BYTES_PER_WORKER)
    return min(most or len(os.sched_getaffinity(0)), worth)


def run(build: Build, blocks: Sequence[UnitRef], *, dry_run: bool) -> dict[str, int]:
    """Does what the pipeline of `construct` does; returns its counters."""
    counters = Counter[str]()

    def count(name: str, number: int) -> None:
        counters[name] += number

    with build.files.while_current():
        for block in blocks:
            for unit in units_in(build.files.output, block):
                build_steps.index(build, unit, count)
        plan = make_plan(build, build.file.num_units)
        tables.release_memory()
        if not dry_run:
            records, totals = [], dict[str, Counter[int]]()
            for group in groups_of(build, plan):
                for slot in write_references(build, plan, group):
                    split, (number, record, labels) = build_steps.write(build, plan, slot, count)
                    records.append((split, number, record))
                    totals.setdefault(split, Counter()).update(labels)
            tables.release_memory()
            build_steps.publish(build, plan, records, totals)
    return dict(counters)
