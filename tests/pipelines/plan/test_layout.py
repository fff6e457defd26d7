"""Which sample stands where: exact sizes, every sample the right number of times, mixed classes."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.config import Sizing
from pipelines.plan.layout import (
    SplitPlan,
    apportion,
    count_shards,
    place,
    plan_split,
    stored_samples,
)
from shardset.errors import ConfigError

LABELS = st.lists(st.integers(-1, 4), min_size=1, max_size=60)
BALANCES = st.sampled_from(["none", "stratified"])
REMAINDERS = st.sampled_from(["spread", "drop", "pad"])


def a_plan(labels: list[int], sizing: Sizing, balance) -> SplitPlan:
    return plan_split(
        "train",
        Counter(labels),
        num_bytes=len(labels),
        fields=["jpg"],
        sizing=sizing,
        balance=balance,
    )


def all_placements(
    labels: list[int], plan: SplitPlan, balance: str, cuts: list[int], seed: int = 0
) -> list[tuple]:
    """(sample, copy, shard, rank) of everything stored, the samples cut into units at `cuts`."""
    strata = np.array(labels) if balance == "stratified" else np.zeros(len(labels), int)
    bounds = sorted({0, *(cut for cut in cuts if cut < len(labels)), len(labels)})
    placed = []
    for start, stop in pairwise(bounds):
        before = Counter(strata[:start].tolist())
        some = place(strata[start:stop], before, plan, seed=seed)
        assert (some.serial == start + some.row).all()
        columns = (some.serial, some.copy, some.shard, some.rank)
        placed += zip(*(column.tolist() for column in columns), strict=True)
    return placed


@given(
    LABELS,
    REMAINDERS,
    BALANCES,
    st.integers(1, 7),
    st.integers(1, 150),
)
@settings(max_examples=30)
def test_shards_are_filled_exactly_and_every_copy_is_stored_once(
    labels, remainder, balance, num_shards, target
):
    sizing = Sizing(num_shards=num_shards, remainder=remainder, target_samples=target)
    if stored_samples(target, sizing, num_shards) < num_shards:
        with pytest.raises(ConfigError, match="can't fill"):
            a_plan(labels, sizing, balance)
        return
    plan = a_plan(labels, sizing, balance)
    placed = all_placements(labels, plan, balance, [])
    sizes = Counter(shard for _, _, shard, _ in placed)
    assert [sizes[shard] for shard in range(num_shards)] == [
        plan.shard_size(shard) for shard in range(num_shards)
    ]
    assert max(sizes.values()) - min(sizes.values()) <= (remainder == "spread")
    assert len({(sample, copy) for sample, copy, _, _ in placed}) == len(placed) == plan.num_stored
    copies = Counter(sample for sample, _, _, _ in placed)
    if balance == "none":
        assert max(copies.values()) - min(copies.get(i, 0) for i in range(len(labels))) <= 1
    for sample, number in copies.items():
        assert {copy for s, copy, _, _ in placed if s == sample} <= set(range(number + 1))


@given(
    LABELS,
    BALANCES,
    st.lists(st.integers(1, 59), max_size=5),
    st.integers(1, 5),
)
@settings(max_examples=30)
def test_how_the_input_is_cut_into_units_changes_nothing(labels, balance, cuts, num_shards):
    sizing = Sizing(num_shards=min(num_shards, len(labels)), repeat=2)
    plan = a_plan(labels, sizing, balance)
    assert sorted(all_placements(labels, plan, balance, [])) == sorted(
        all_placements(labels, plan, balance, cuts)
    )


@given(LABELS, REMAINDERS, st.integers(1, 6))
@settings(max_examples=30)
def test_stratified_shards_hold_each_class_within_one_of_its_share(labels, remainder, num_shards):
    sizing = Sizing(num_shards=num_shards, remainder=remainder)
    if stored_samples(len(labels), sizing, num_shards) < num_shards:
        return
    plan = a_plan(labels, sizing, "stratified")
    placed = all_placements(labels, plan, "stratified", [])
    counts = Counter((labels[sample], shard) for sample, _, shard, _ in placed)
    for label, stratum in plan.strata.items():
        share = stratum.num_stored / num_shards
        assert all(abs(counts[label, shard] - share) < 1 for shard in range(num_shards))


FROZEN = [
    [(0, 1), (4, 0), (3, 0), (3, 1), (4, 1), (1, 1)],
    [(2, 0), (2, 1), (1, 0), (5, 1), (0, 0), (5, 0)],
]


def test_where_samples_go_is_frozen():
    # The bytes of every existing shard set depend on these numbers. To change them, raise
    # ORDER_VERSION.
    labels = [0, 0, 0, 1, 1, 1]
    plan = a_plan(labels, Sizing(num_shards=2, repeat=2), "none")
    placed = sorted(
        all_placements(labels, plan, "none", [], seed=7), key=lambda entry: (entry[2], entry[3])
    )
    found = [[], []]
    for sample, copy, shard, _ in placed:
        found[shard].append((sample, copy))
    assert found == FROZEN


def test_classes_that_come_one_after_the_other_are_mixed_in_every_shard():
    labels = [number // 100 for number in range(1000)]
    plan = a_plan(labels, Sizing(num_shards=10), "none")
    for shard in range(10):
        seen = Counter(
            labels[sample]
            for sample, _, where, _ in all_placements(labels, plan, "none", [])
            if where == shard
        )
        assert len(seen) == 10
        assert max(seen.values()) < 30


def test_cifar_repeated_to_1280000_gives_640_shards_of_2000():
    sizing = Sizing(samples_per_shard=2000, target_samples=1_280_000)
    plan = a_plan([0] * 50_000, sizing, "none")
    assert (plan.num_shards, plan.num_stored, plan.num_repeats) == (640, 1_280_000, 1_230_000)
    assert {plan.shard_size(shard) for shard in range(640)} == {2000}


def test_by_default_a_shard_is_about_128_mib_and_a_small_split_has_up_to_four_of_100_samples():
    assert count_shards(1000, 1000, Sizing()) == 4
    assert [count_shards(number, 1000, Sizing()) for number in (1, 3, 10, 199, 200, 399, 400)] == [
        1,
        1,
        1,
        1,
        2,
        3,
        4,
    ]
    assert count_shards(1_281_167, 144_000_000_000, Sizing()) == 1073
    assert count_shards(3, 900_000_000, Sizing()) == 3


@given(st.integers(0, 1000), st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(sum))
def test_apportioned_shares_add_up_and_are_within_one_of_exact(total, weights):
    shares = apportion(total, weights)
    assert sum(shares) == total
    assert all(
        abs(share - total * weight / sum(weights)) < 1
        for share, weight in zip(shares, weights, strict=True)
    )


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"num_shards": 3, "samples_per_shard": 2}, "--num-shards and --samples-per-shard"),
        ({"repeat": 2, "target_samples": 5}, "--repeat and --target-samples"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(asked, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Sizing(**asked)
