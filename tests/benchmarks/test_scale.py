"""What planning holds and sends does not grow with the number of samples, but for what is named here."""

import pickle

import numpy as np
import pytest

from benchmarks import scale
from pipelines import planning, tables
from pipelines.assigning import assign_units
from pipelines.job import put
from pipelines.planning import Sizing, UnitStart, plan_split
from shardset import naming

MANY = [10**5, 10**7, 10**9]
ELEMENT_LIMIT_BYTES = 100 * 2**20


@pytest.mark.parametrize("n", MANY)
def test_the_plan_of_a_split_is_a_few_numbers_whatever_its_size(n):
    assert len(pickle.dumps(scale.plan_of(n))) < 1_000


@pytest.mark.parametrize("n", MANY)
def test_every_shard_belongs_to_one_group_and_a_group_is_about_as_large_as_any_other(n):
    plan = scale.plan_of(n)
    shards = np.arange(plan.num_shards)
    sizes = np.bincount(
        plan.group_of(shards), weights=[plan.shard_size(shard) for shard in shards], minlength=plan.num_groups
    )
    assert sizes.sum() == n
    assert sizes.max() <= planning.GROUP_SAMPLES + plan.shard_size(0)


def test_what_a_worker_keeps_of_a_group_is_the_same_for_a_million_and_for_a_thousand_million_samples():
    small, large = (scale.run_step("plan_group", n) for n in (10**6, 10**9))
    assert large.num_refs == pytest.approx(small.num_refs, rel=0.1)
    per_reference = [step.num_object_bytes / n for step, n in ((small, 10**6), (large, 10**9))]
    assert per_reference[1] == pytest.approx(per_reference[0], rel=0.1)


def test_a_worker_grows_as_much_for_a_thousand_million_samples_as_for_ten_million():
    grown = [scale.measure("plan_group", n).added_bytes for n in (10**7, 10**9)]
    assert max(grown) < 128 * 2**20
    assert scale.measure("assign_batches", 10**9).added_bytes < 256 * 2**20


@pytest.mark.parametrize("n", [10**7, 10**9])
def test_references_go_through_the_shuffle_by_the_dozen_and_at_less_than_a_hundred_bytes_each(n):
    step = scale.run_step("assign_batches", n)
    assert step.num_objects < n / 12
    assert step.num_object_bytes < 100 * n


def test_what_sees_all_units_holds_about_a_hundred_bytes_of_each():
    step = scale.run_step("plan_all", 10**7)
    assert step.num_objects == 1_000
    assert step.num_object_bytes < 1_000 * 500


def test_samples_that_are_stored_four_hundred_times_make_no_element_larger():
    job = scale.job_of(1)
    num_samples, repeats = 1_000, 400
    put(job.output, naming.unit_path(0), tables.to_bytes(scale.unit_table(0).slice(0, num_samples)))
    split = plan_split(
        "train", {0: num_samples}, num_bytes=10**8, fields=["jpg", "cls"], balance="none",
        sizing=Sizing(num_shards=8, repeat=repeats),
    )  # fmt: skip
    plan = scale.plan_file(split, units=1)
    parts = list(assign_units(job, plan, [(0, {"train": UnitStart(serial=0, strata={0: 0})}, {})]))
    assert sum(len(part) for _, part in parts) == num_samples * repeats
    assert len({key for _, part in parts for key in part["key"].to_pylist()}) == num_samples * repeats
    assert max(len(part) for _, part in parts) <= planning.ROWS_AT_ONCE
    assert max(len(tables.placed_to_bytes(part)) for _, part in parts) < ELEMENT_LIMIT_BYTES // 4
