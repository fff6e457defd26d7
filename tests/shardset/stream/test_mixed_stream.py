import itertools
import math
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardset
from shardset.decode.crops import PadCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError
from shardset.order.lanes import default_lanes, rank_part
from shardset.stream.mixed_stream import MixedStream, Share, share_lanes
from tests.makers.shardset import new_set, png_samples


@pytest.fixture(scope="module")
def urls():
    return [new_set(png_samples("train", size, size=8)) for size in (40, 90, 25)]


def mixed_of(urls, weights, **options):
    shares = [Share(url, "train", weight) for url, weight in zip(urls, weights, strict=True)]
    choices = {"rank": 0, "world_size": 1, "seed": 7, "num_threads": 1}
    return MixedStream(shares, **{**choices, **options})


make = partial(
    mixed_of,
    weights=(3, 2, 1),
    image=ImageSpec(size=8, crop=PadCrop(1)),
    global_batch_size=24,
    num_lanes=12,
)


def take(mixed, count, start=0):
    batches = mixed.batches(start)
    found = [batch for _, batch in itertools.islice(batches, count)]
    batches.close()
    return found


def test_every_batch_holds_the_exact_quotas(urls):
    for batch in take(make(urls), 20):
        assert np.bincount(batch["source"]).tolist() == [12, 8, 4]
        assert (batch["weight"] == 1).all()
        assert batch["image"].shape == (24, 8, 8, 3)


def test_a_shard_set_repeats_no_sample_before_its_epoch_ends(urls):
    mixed = make(urls)
    batches = take(mixed, len(mixed.streams[1]))
    ids = np.concatenate([batch["id"][batch["source"] == 1] for batch in batches])
    assert len(set(ids.tolist())) == len(ids) == 88


def test_states_of_different_steps_are_refused(urls):
    mixed = make(urls)
    with pytest.raises(ConfigError, match="expected one"):
        mixed.load_state([mixed.state(1)[0], *mixed.state(2)[1:]])


@pytest.mark.parametrize(
    "options", [{"weights": (1, 1, 1)}, {"num_lanes": 24}], ids=["weights", "lanes"]
)
def test_states_of_other_shares_are_refused_by_what_they_follow_from(urls, options):
    with pytest.raises(ConfigError, match=r"had \[6, 4, 2\] lanes there.*the weights") as caught:
        make(urls, **options).load_state(make(urls).state(3))
    assert "budget_bytes" not in str(caught.value)


def test_states_of_another_number_of_shard_sets_are_refused(urls):
    states = make(urls[:2], weights=(1, 1), global_batch_size=16, num_lanes=8).state(3)
    with pytest.raises(ConfigError, match="2 states for 3 shard sets"):
        make(urls, weights=(1, 1, 1)).load_state(states)


@given(st.lists(st.floats(0.5, 9), min_size=1, max_size=8), st.integers(200, 256))
def test_lanes_are_shared_within_one_of_the_exact_share(weights, num_lanes):
    lanes = share_lanes(weights, num_lanes)
    assert sum(lanes) == num_lanes
    assert all(
        abs(own - weight / sum(weights) * num_lanes) < 1
        for own, weight in zip(lanes, weights, strict=True)
    )


@pytest.mark.parametrize(
    "weights", [[], [1, 0], [1, -1], [1, math.nan], [math.nan, 1], [1, math.inf], [1000, 1]]
)
def test_weights_that_are_no_shares_are_refused(weights):
    said = "leave set 1 without one" if 1000 in weights else "at least one, all above 0 and finite"
    with pytest.raises(ConfigError, match=said):
        share_lanes(weights, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_lanes": 0}, "0 lanes do not divide a global batch of 24"),
        ({"num_lanes": "4"}, "num_lanes is '4', expected a whole number"),
        ({"seed": None}, "it needs a seed; evaluate each set by its own Stream"),
        ({"weights": (1, 1, 8), "global_batch_size": 60}, "25 samples do not fill one batch"),
    ],
)
def test_what_makes_no_mixture_is_refused(urls, options, message):
    with pytest.raises(ConfigError, match=message):
        make(urls, **options)


@pytest.fixture(scope="module")
def larger():
    """A mixture that needs some MiB, of its second set more than of its first."""
    return [new_set(png_samples("train", 40, size=8)) for _ in range(2)]


make_larger = partial(
    mixed_of, weights=(1, 3), image=ImageSpec(size=224), global_batch_size=32, num_lanes=16
)


def named_budget(urls, **options):
    """The budget that a refusal of 1 MiB names."""
    with pytest.raises(ConfigError, match=r"2 shard sets .* raise budget_bytes to \d+") as refused:
        make_larger(urls, budget_bytes=1 << 20, **options)
    return int(re.search(r"budget_bytes to (\d+)", str(refused.value))[1])


def test_a_budget_too_small_is_refused_with_one_that_is_enough_for_all_sets(larger):
    enough = named_budget(larger)
    assert all(
        stream.memory.total <= enough // 2
        for stream in make_larger(larger, budget_bytes=enough).streams
    )
    with pytest.raises(ConfigError, match="raise budget_bytes"):
        make_larger(larger, budget_bytes=enough - (2 << 20))


def test_a_replica_counts_its_own_part_of_a_batch(larger):
    whole = make_larger(larger)
    parts = [make_larger(larger, rank=rank, world_size=8) for rank in range(8)]
    for number, stream in enumerate(whole.streams):
        assert sum(part.streams[number].memory.decoded for part in parts) == stream.memory.decoded
        assert stream.memory.decoded == 4 * stream.batch_size * 3 * 224**2
    assert named_budget(larger, rank=7, world_size=8) < named_budget(larger) / 2


# --- any world ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide():
    """Two sets that fill batches of 1,024 in the shares 3 to 1."""
    samples = png_samples("train", 1700, size=8)
    return [new_set(samples), new_set(samples[:600])]


make_wide = partial(mixed_of, weights=(3, 1), image=None, global_batch_size=1024)


@pytest.mark.parametrize(("world", "repeats"), [(1, 1), (320, 1), (1024, 1), (1024, 3)])
def test_a_mixture_has_the_lanes_that_a_stream_has_on_as_many_replicas(wide, world, repeats):
    options = {"global_batch_size": repeats * 1024, "augment_repeats": repeats}
    mixed = make_wide(wide, world_size=world, **options)
    assert sum(mixed.lanes) == default_lanes(1024, world)


@pytest.mark.parametrize(("there", "here"), [(1, 512), (1024, 5)])
def test_a_mixture_goes_on_in_its_recorded_order_on_any_world(wide, there, here):
    mixed = make_wide(wide, world_size=there, rank=there - 1)
    saved = mixed.state(3)
    recorded = make_wide(wide, num_lanes=sum(mixed.lanes))
    expected = take(recorded, 2, start=3)
    for rank in (0, here - 1):
        again = make_wide(wide, world_size=here, rank=rank)
        assert again.load_state(saved) == 3
        assert again.state(3) == saved
        slots = rank_part(1024, rank, here)
        for batch, whole in zip(take(again, 2, start=3), expected, strict=True):
            assert batch["id"].tolist() == whole["id"][slots.start : slots.stop].tolist()
            assert batch["source"].tolist() == whole["source"][slots.start : slots.stop].tolist()


def test_a_mixture_s_window_follows_what_a_replica_holds(wide):
    options = {"global_batch_size": 64, "num_lanes": 16, "block_size": 8, "budget_bytes": 4 << 20}
    windows = [
        [stream.order.window for stream in make_wide(wide, world_size=n, **options).streams]
        for n in (1, 4, 16)
    ]
    assert windows[0] < windows[1] < windows[2]
    assert windows[0][0] < windows[1][0] < windows[2][0]
    for rank in range(16):
        streams = make_wide(wide, world_size=16, rank=rank, **options).streams
        assert [stream.order.window for stream in streams] == windows[2]
        assert sum(stream.memory.total for stream in streams) <= 4 << 20


def test_a_mixture_with_more_replicas_than_lanes_is_warned_once_of_what_they_read_twice(
    wide, caplog
):
    for rank in range(3):
        make_wide(wide, world_size=8, rank=rank, num_lanes=4)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "8 readers share the 4 lanes of this order, so they read up to 2.00 times" in record.message
    )
    assert "4 readers would share none" in record.message


def test_sets_whose_labels_stand_for_other_classes_are_not_mixed(tmp_path):
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "cat"]), ("c", ["cat"])):
        with shardset.Writer(tmp_path / name, classes=classes) as writer:
            for _ in range(24):
                writer.write(image=np.zeros((8, 8, 3), np.uint8), label=0)
    make([tmp_path / "a", tmp_path / "c"], weights=(1, 1))
    with pytest.raises(ConfigError, match="/b train: its labels are of other classes"):
        make([tmp_path / "a", tmp_path / "b"], weights=(1, 1))
