"""What planning holds and sends does not grow with the number of samples, but for what is named
here.
"""

import pickle

import numpy as np
import pytest

from benchmarks import scale
from pipelines.plan import layout


@pytest.mark.parametrize("n", [10**5, 10**8])
def test_a_plan_is_a_few_numbers_whatever_its_size_and_its_groups_are_equal(n):
    plan = scale.plan_of(n)
    assert len(pickle.dumps(plan)) < 1_000
    shards = np.arange(plan.num_shards)
    shard_sizes = [plan.shard_size(shard) for shard in shards.tolist()]
    sizes = np.bincount(plan.group_of(shards), weights=shard_sizes, minlength=plan.num_groups)
    assert sizes.sum() == n
    assert sizes.max() <= layout.MAX_BATCH + plan.shard_size(0)
    num_batches = -(-scale.num_units(n) // layout.units_per_batch(scale.num_units(n), [plan]))
    # names of parts that go through the shuffle
    assert num_batches * plan.num_groups <= max(2, n / 200)


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
