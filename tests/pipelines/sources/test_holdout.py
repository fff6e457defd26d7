import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sources.holdout import check_holdout, split_of
from shardset.errors import ConfigError

KEYS = [f"cat/{number:05d}" for number in range(4000)]


def test_fractions_are_kept_within_chance():
    splits = [split_of(key, {"test": 0.1, "validation": 0.3}, seed=1) for key in KEYS]
    assert 330 < splits.count("test") < 470
    assert 1080 < splits.count("validation") < 1320
    assert splits.count("train") == len(KEYS) - splits.count("test") - splits.count("validation")


def test_without_holdout_everything_is_train():
    assert {split_of(key, {}, seed=1) for key in KEYS[:100]} == {"train"}


def test_the_order_of_the_splits_does_not_matter():
    first = [split_of(key, {"a": 0.2, "b": 0.3}, seed=1) for key in KEYS[:500]]
    assert first == [split_of(key, {"b": 0.3, "a": 0.2}, seed=1) for key in KEYS[:500]]


def test_another_seed_holds_out_other_samples():
    chosen = [{key for key in KEYS if split_of(key, {"test": 0.1}, seed) == "test"} for seed in (1, 2)]
    assert 0 < len(chosen[0] & chosen[1]) < 0.25 * len(chosen[0])


def test_a_holdout_is_frozen():
    # Held-out samples of existing sets. To change them is to leak test samples into training.
    chosen = [key for key in KEYS[:60] if split_of(key, {"test": 0.1}, seed=7) == "test"]
    assert chosen == ["cat/00004", "cat/00033", "cat/00046", "cat/00050"]


@given(st.text("abc/", max_size=9), st.integers(0, 2**63))
def test_a_fraction_close_to_one_takes_nearly_everything(key, seed):
    assert split_of(key, {"test": 1 - 1e-15}, seed) == "test"


@pytest.mark.parametrize(
    "holdout",
    [
        {"test": 0},
        {"test": 1},
        {"test": -0.1},
        {"test": float("nan")},
        {"a": 0.5, "b": 0.5},
        {"train": 0.1},
        {"a/b": 0.1},
    ],
)
def test_a_holdout_that_makes_no_sense_is_refused(holdout):
    with pytest.raises(ConfigError, match="--holdout"):
        check_holdout(holdout)
