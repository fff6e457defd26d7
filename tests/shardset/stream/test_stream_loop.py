"""`shardset.Stream` as a loop of one's own uses it: short arguments, iteration, position, and the
world around.
"""

import itertools
import re
import sys

import numpy as np
import pytest

import shardset
from shardset.decode.crops import CenterCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError
from tests.makers.documented import start
from tests.makers.reading import all_same, same
from tests.makers.shardset import jpeg_samples, new_set

NUM_TRAIN = 41


@pytest.fixture(scope="module")
def shards(location):
    """The URL of a shard set."""
    samples = {
        "train": jpeg_samples("train", NUM_TRAIN, height=24, width=30),
        "val": jpeg_samples("val", 9),
    }
    return new_set(samples, location, num_shards=3)


def make(url, split="train", **options):
    return shardset.Stream(url, split, **{"batch_size": 8, "image_size": 16, **options})


def test_the_short_spellings_mean_what_the_exact_ones_do(shards):
    exact = shardset.Stream(
        shards,
        "train",
        global_batch_size=8,
        rank=0,
        world_size=1,
        seed=0,
        image=ImageSpec(size=16, crop=RandomResizedCrop(), flip="pixels"),
    )
    assert make(shards).spec == exact.spec
    assert all_same(make(shards), exact.epoch(0))


def test_each_iteration_is_the_next_epoch_whatever_else_was_read(shards):
    stream, exact = make(shards), make(shards)
    assert len(stream) == 6
    assert stream.classes == [f"class {label}" for label in range(10)]
    assert all_same(stream, exact.epoch(0))
    for _ in itertools.islice(stream, 2):
        pass
    next(stream.epoch(4, 2))
    assert all_same(stream, exact.epoch(2))


@pytest.mark.parametrize("num_taken", [0, 1, 5, 6, 13])
def test_a_state_goes_on_after_the_last_batch_that_was_taken(shards, num_taken):
    # Far fewer than are prefetched by then.
    stream = make(shards, prefetch=4)
    taken = itertools.chain.from_iterable(itertools.repeat(stream))
    for _ in range(num_taken):
        next(taken)
    saved = stream.state_dict()
    expected = [next(taken) for _ in range(9)]
    again = make(shards)
    again.load_state_dict(saved)
    assert all_same(
        expected, itertools.islice(itertools.chain.from_iterable(itertools.repeat(again)), 9)
    )


def test_a_state_is_plain_values(shards):
    stream = make(shards, seed=np.uint64(2**64 - 1))
    next(iter(stream))
    state = stream.state_dict()
    assert {type(value) for value in state.values()} <= {int, str}
    numbers = {
        name: np.int64(value) if isinstance(value, int) and value < 2**63 else value
        for name, value in state.items()
    }
    stream.load_state_dict(numbers)
    assert stream.state_dict() == state


def test_states_of_several_orders_can_be_loaded_one_after_the_other(shards):
    again = make(shards)
    for options in ({"num_lanes": 2, "window": 5}, {"num_lanes": 4, "block_size": 3}):
        first = make(shards, **options)
        batches = iter(first)
        next(batches)
        again.load_state_dict(first.state_dict())
        assert all_same(again, batches)


def test_a_state_of_another_order_is_refused_and_changes_nothing(shards):
    saved = make(shards, num_lanes=2).state_dict()
    stream = make(shards, num_lanes=4)
    with pytest.raises(ConfigError, match="num_lanes"):
        stream.load_state_dict(saved)
    assert all_same(stream, make(shards, num_lanes=4).epoch(0))


@pytest.mark.parametrize(
    ("state", "message"),
    [({"epoch": 3}, "the order state can't be read"), ({"epoch": object()}, "what no state does")],
)
def test_a_state_that_is_none_is_refused(shards, state, message):
    with pytest.raises(ConfigError, match=message):
        make(shards).load_state_dict(state)


def test_with_closes(shards):
    with make(shards) as stream:
        batches = iter(stream)
        next(batches)
    assert list(batches) == []
    with pytest.raises(ConfigError, match="the stream is closed"):
        next(iter(stream))


# --- images by name -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "crop", "flip"),
    [
        ({"image": "train"}, RandomResizedCrop(), "pixels"),
        ({"image": "eval", "image_size": 224}, CenterCrop(256), False),
        ({"seed": None, "split": "val"}, CenterCrop(18), False),
    ],
)
def test_a_preset_is_that_of_timm_and_suits_the_order(shards, options, crop, flip):
    spec = make(shards, **options).spec
    assert spec.image == ImageSpec(size=options.get("image_size", 16), crop=crop, flip=flip)


def test_images_that_come_mirrored_are_those_of_flip(shards):
    crop = RandomResizedCrop()
    told = make(shards, image=ImageSpec(size=16, crop=crop, flip="device"), image_size=None)
    flipped = 0
    for batch, expected in zip(make(shards), told, strict=True):
        flip = expected.pop("flip")
        expected["image"][flip] = expected["image"][flip][:, :, ::-1]
        assert same(batch, expected)
        flipped += flip.sum()
    assert 0 < flipped < 48


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": None}, "the size of the images is missing; give image_size=224, or"),
        ({"image_size": None, "image": "eval"}, "the size of the images is missing"),
        ({"image": None}, "image_size=16 and image=None say two things"),
        ({"image": ImageSpec(size=16)}, "image_size=16 and image=ImageSpec.* say two things"),
        ({"image": "test"}, "image is 'test', expected 'train', 'eval', an ImageSpec, or None"),
        ({"image": "train", "seed": None}, "takes no random crop or flip"),
        ({"image_size": "16"}, "image_size is '16', expected a whole number"),
        ({"global_batch_size": 8}, "batch_size .* and global_batch_size .* 2 are given"),
        ({"batch_size": None}, "batch_size .* and global_batch_size .* 0 are given"),
        ({"batch_size": 2.5}, "batch_size is 2.5, expected a whole number"),
        ({"rank": 1}, "rank is 1 and world_size is None, expected .* give both"),
        ({"world_size": 2}, "rank is None and world_size is 2, expected .* give both"),
    ],
)
def test_arguments_that_contradict_each_other_are_named(shards, options, message):
    with pytest.raises(ConfigError, match=message):
        make(shards, **options)


# --- one process or several -----------------------------------------------------------------------


LAUNCHES = [
    ("WORLD_SIZE", r'int(os.environ["RANK"]), world_size=4'),
    ("SLURM_STEP_NUM_TASKS", r'int(os.environ["SLURM_PROCID"]), world_size=4'),
    ("OMPI_COMM_WORLD_SIZE", r'int(os.environ["OMPI_COMM_WORLD_RANK"]), world_size=4'),
    ("PMI_SIZE", r'int(os.environ["PMI_RANK"]), world_size=4'),
    (
        "PJRT_LOCAL_PROCESS_COUNT",
        "torch_xla.runtime.global_ordinal(), world_size=torch_xla.runtime.world_size()",
    ),
]


@pytest.mark.parametrize(("size", "place"), LAUNCHES)
def test_one_of_several_processes_must_say_which_it_is(shards, monkeypatch, size, place):
    monkeypatch.setenv(size, "4")
    with pytest.raises(ConfigError, match=rf"{size} is 4.*rank={re.escape(place)}"):
        make(shards)
    assert make(shards, rank=3, world_size=4).spec.global_batch_size == 32
    assert make(shards, rank=0, world_size=1).spec.global_batch_size == 8


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PJRT_LOCAL_PROCESS_COUNT"])
@pytest.mark.parametrize("size", ["1", "", "many"])
def test_a_launcher_of_one_process_needs_no_arguments(shards, monkeypatch, name, size):
    monkeypatch.setenv(name, size)
    assert make(shards).spec.world_size == 1


DISTRIBUTED = """
import sys, torch.distributed as distributed
from torch.testing._internal.distributed import fake_pg
from shardset import Stream
distributed.init_process_group("fake", store=distributed.HashStore(), rank=0, world_size=3)
Stream("nowhere", "train", batch_size=8, image_size=16)
"""


def test_processes_that_torch_knows_of_must_be_named(tmp_path):
    done = start([sys.executable, "-c", DISTRIBUTED], tmp_path)
    assert "torch.distributed runs 3 processes" in done.stderr


def test_a_stream_is_not_indexed(shards):
    with pytest.raises(
        ConfigError, match=r"BatchDataset\(stream\), batch_size=None\), or shardset.open"
    ):
        make(shards)[0]
