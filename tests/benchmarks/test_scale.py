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
    assert sizes.max() <= layout.MAX_GROUP + plan.shard_size(0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "max_bytes"), [("find_duplicates", 3 * 2**30), ("gather_group", 4 * 2**30)]
)
def test_a_worker_stays_within_8_gb_for_100_million_samples(name, max_bytes):
    assert scale.measure(name, 10**8).added_bytes < max_bytes


def test_the_plan_holds_no_summary_of_a_unit():
    assert scale.run_step("plan_all", 10**7).added_bytes < 16 * 2**20
