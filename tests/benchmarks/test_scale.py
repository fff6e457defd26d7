"""What planning holds and sends does not grow with the number of samples, but for what is named
here.
"""

import pickle

import numpy as np
import pytest

from benchmarks import scale
from pipelines.config import Sizing
from pipelines.plan import assign, layout, paths, tables
from pipelines.plan.assign import assign_batch
from pipelines.plan.layout import UnitOffset, plan_split
from pipelines.plan.slices import read_slices


@pytest.mark.parametrize("n", [10**5, 10**8])
def test_a_plan_is_a_few_numbers_whatever_its_size_and_its_groups_are_equal(n):
    plan = scale.plan_of(n)
    assert len(pickle.dumps(plan)) < 1_000
    shards = np.arange(plan.num_shards)
    shard_sizes = [plan.shard_size(shard) for shard in shards]
    sizes = np.bincount(plan.group_of(shards), weights=shard_sizes, minlength=plan.num_groups)
    assert sizes.sum() == n
    assert sizes.max() <= layout.MAX_BATCH + plan.shard_size(0)
    num_batches = -(-scale.num_units(n) // layout.units_per_batch(scale.num_units(n), [plan]))
    # names of parts that go through the shuffle
    assert num_batches * plan.num_groups <= max(2, n / 200)


@pytest.mark.nightly
def test_what_a_worker_keeps_of_a_group_is_bounded_for_a_thousand_million_samples():
    small, large = (scale.run_step("gather_group", n) for n in (10**6, 10**9))
    assert large.num_refs <= layout.MAX_BATCH + scale.plan_of(10**9).shard_size(0)
    per_reference = [step.num_object_bytes / n for step, n in ((small, 10**6), (large, 10**9))]
    assert per_reference[1] == pytest.approx(per_reference[0], rel=0.1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["spread_batch", "find_duplicates_in_bucket", "assign", "gather_group"]
)
def test_a_worker_does_not_grow_beyond_its_bound_for_a_thousand_million_samples(name):
    assert scale.measure(name, 10**9).added_bytes < 384 * 2**20


def test_the_plan_holds_no_summary_of_a_unit_and_what_it_sends_is_about_the_classes_of_a_batch():
    few, many = (scale.run_step("plan_all", n) for n in (10**6, 10**7))
    assert many.added_bytes < 16 * 2**20
    assert many.num_object_bytes / many.num_objects < 8 * scale.NUM_CLASSES
    assert many.num_objects <= 11 * few.num_objects


def test_samples_that_are_stored_four_hundred_times_make_no_part_larger():
    files = scale.files_of(1)
    files.write(
        paths.unit_path(0), tables.unit_to_bytes(tables.unit_table(scale.unit_rows(0)[:1_000], []))
    )
    sizing, options = (
        Sizing(num_shards=8, repeat=400),
        {"fields": ["jpg", "cls"], "balance": "none"},
    )
    plan = scale.plan_file(
        plan_split("train", {0: 1_000}, num_bytes=10**8, sizing=sizing, **options), units=1
    )
    found = assign_batch(
        files, plan, 0, {"train": UnitOffset(serial=0, strata={0: 0})}, [], seed=0, stratified=False
    )
    parts = [
        tables.placements_from_bytes(data)
        for data in read_slices(files.output, [part for _, part in found])
    ]
    stored = [
        (row, copy)
        for part in parts
        for row, copy in zip(part["row"], part["copy"].to_pylist(), strict=True)
    ]
    assert len(stored) == len(set(stored)) == 400_000
    assert max(len(part) for part in parts) <= assign.MAX_SLICE_ROWS
