import itertools
import logging
import signal
import threading
from functools import partial

import numpy as np
import pytest

from shardset.decode.augment import Chain, RandAugment, RandomErasing
from shardset.decode.crops import CenterCrop, PadCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError, UndecodableImage
from shardset.format.tar import StoredSample
from shardset.storage.open import open_storage
from tests.makers.reading import (
    BytesRead,
    RecordingStorage,
    all_same,
    same,
    stream_of,
    together,
)
from tests.makers.shardset import (
    encode,
    image_sample,
    jpeg_samples,
    new_set,
    pixels,
    png_samples,
)

WHOLE = ImageSpec(size=16, crop=CenterCrop(16))
PADDED = ImageSpec(size=16, crop=PadCrop(2), flip="device")
NUM_TRAIN, NUM_VAL = 101, 37


@pytest.fixture(scope="module")
def shards(location):
    """The URL of a shard set."""
    samples = {
        "train": png_samples("train", NUM_TRAIN, size=16),
        "val": jpeg_samples("val", NUM_VAL),
    }
    return new_set(samples, location, num_shards=4)


make = partial(stream_of, global_batch_size=12, image=PADDED)


def test_an_epoch_holds_every_sample_once_with_its_own_label_and_pixels(shards):
    stream = make(shards, image=WHOLE, with_key=True)
    batches = list(stream.epoch(0))
    assert len(batches) == len(stream) == 9
    found = together(batches)
    real = found["weight"] == 1
    assert sorted(found["id"][real]) == list(range(NUM_TRAIN))
    assert np.array_equal(found["label"], found["id"] % 10)
    assert found["key"].tolist() == [f"train-{id_:06d}" for id_ in found["id"]]
    assert all(
        np.array_equal(image, pixels(id_, 16, 16))
        for id_, image in zip(found["id"], found["image"], strict=True)
    )


def test_a_batch_has_the_documented_arrays(shards):
    batch = next(make(shards, world_size=3, rank=1).epoch(0))
    shapes = {name: (value.shape, value.dtype.name) for name, value in batch.items()}
    assert shapes == {
        "image": ((4, 16, 16, 3), "uint8"),
        "label": ((4,), "int64"),
        "weight": ((4,), "float32"),
        "id": ((4,), "int64"),
        "flip": ((4,), "bool"),
    }


REPEATED = {
    "augment_repeats": 3,
    "transform": lambda row, rng: {**row, "drawn": rng.integers(1 << 30)},
}


def test_a_repeated_sample_is_augmented_anew_in_each_slot_of_its_batch(shards):
    batches = list(make(shards, **REPEATED).epoch(0))
    assert len(batches) == -(-NUM_TRAIN // 4)
    found, different = together(batches), 0
    counts = np.bincount(found["id"][found["weight"] == 1])
    assert counts.tolist() == [3] * NUM_TRAIN
    for batch in batches:
        slots = batch["id"].reshape(4, 3)
        assert (slots == slots[:, :1]).all()
        assert (batch["label"] == batch["id"] % 10).all()
        images = batch["image"].reshape(4, 3, -1)
        different += sum(not np.array_equal(views[0], views[1]) for views in images)
    assert different > NUM_TRAIN / 2
    assert len(np.unique(found["drawn"][found["weight"] == 1])) == 3 * NUM_TRAIN


DRAWN = {
    "the batches": {},
    "an evaluation": {**REPEATED, "augment_repeats": 1, "seed": None, "window": 0, "image": WHOLE},
    "repeats": REPEATED,
    "repeats without a window": {**REPEATED, "window": 0},
    "augmentations": {
        "transform": Chain(
            (RandAugment(magnitude=9, magnitude_std=0.5), RandomErasing(probability=0.5))
        )
    },
}


@pytest.mark.parametrize("world", [5, 12])
@pytest.mark.parametrize("options", DRAWN.values(), ids=DRAWN)
def test_batches_and_all_that_is_drawn_are_the_same_in_any_world_that_resumes_another(
    shards, options, world
):
    whole = list(make(shards, **options).epoch(1))
    saved = make(shards, rank=6, world_size=7, **options).state(1, 3)
    alone = {"world_size": world, "num_threads": 1, "prefetch": 1}
    parts = [make(shards, rank=rank, **alone, **options) for rank in range(world)]
    steps = zip(*(part.epoch(*part.load_state_dict(saved)) for part in parts), strict=True)
    assert all_same(map(together, steps), whole[3:])


@pytest.mark.parametrize("options", [{}, REPEATED], ids=["plain", "repeated, transformed"])
def test_later_epochs_come_from_the_cache_with_all_that_is_drawn(shards, options):
    cached = make(shards, **options)
    fresh = make(shards, budget_bytes=300_000, **options)
    assert cached.aids.cache is not None
    assert fresh.aids.cache is None
    list(cached.epoch(0))
    cached.source.table.addresses = None  # nothing is looked up any more
    for epoch in (1, 2):
        assert all_same(cached.epoch(epoch), fresh.epoch(epoch))


def test_epochs_go_on_across_the_border_with_the_same_batches(shards):
    stream = make(shards)
    found = list(itertools.islice(stream.epochs(0, 7), 4))
    assert [(epoch, step) for epoch, step, _ in found] == [(0, 7), (0, 8), (1, 0), (1, 1)]
    expected = [*stream.epoch(0, 7), *itertools.islice(stream.epoch(1), 2)]
    assert all_same([batch for _, _, batch in found], expected)
    assert list(stream.epoch(1, 9)) == []
    assert next(stream.epochs(1, 9))[:2] == (2, 0)


def test_epochs_differ_in_order_and_in_crops(shards):
    stream = make(shards)
    first, second = (together(list(stream.epoch(epoch))) for epoch in (0, 1))
    assert not np.array_equal(first["id"], second["id"])
    at = {id_: number for number, id_ in enumerate(second["id"])}
    moved = [at[id_] for id_ in first["id"]]
    assert (first["image"] != second["image"][moved]).any(axis=(1, 2, 3)).mean() > 0.5


def test_evaluation_is_in_stored_order_and_weighs_every_sample_once(shards):
    stream = make(
        shards, split="val", seed=None, window=0, image=ImageSpec(size=16, crop=CenterCrop(20))
    )
    batches = list(stream.epoch(0))
    assert {batch["image"].shape for batch in batches} == {(12, 16, 16, 3)}
    assert sum(batch["weight"].sum() for batch in batches) == NUM_VAL
    assert same(together(batches), together(list(stream.epoch(5))))


def test_nothing_is_decoded_when_no_image_is_asked_for(shards):
    batch = next(make(shards, image=None, fields=("png", "cls")).epoch(0))
    assert [int(text) for text in batch["cls"]] == batch["label"].tolist()
    assert batch["png"] == [encode(pixels(id_, 16, 16), "png") for id_ in batch["id"]]
    assert "image" not in batch


def test_samples_without_a_field_pass_none_and_without_an_image_are_named(tmp_path):
    with_json = StoredSample(key="a", fields=(("png", b"x"), ("json", b"{}")), label=-1, serial=0)
    without = StoredSample(key="b", fields=(("json", b"[]"),), label=-1, serial=1)
    new_set({"all": [with_json, without]}, tmp_path, num_shards=1, num_classes=0)
    options = {"global_batch_size": 2, "split": "all", "seed": None, "window": 0}
    batch = next(make(str(tmp_path), image=None, fields=("png", "json"), **options).epoch(0))
    assert batch["png"] == [b"x", None]
    assert batch["label"].tolist() == [-1, -1]
    with pytest.raises(
        UndecodableImage, match=r"all-000000.tar: sample 'b' at byte \d+: it has no image"
    ):
        list(make(str(tmp_path), image=WHOLE, **options | {"global_batch_size": 1}).epoch(0, 1))


@pytest.mark.parametrize("name", ["image", "source"])
def test_a_field_that_is_called_like_an_array_of_the_batch_is_refused(tmp_path, name):
    sample = StoredSample(key="a", fields=(("png", b"x"), (name, b"{}")), label=-1, serial=0)
    new_set([sample], tmp_path, num_shards=1, num_classes=0)
    options = {"global_batch_size": 1, "seed": None, "window": 0, "image": None}
    with pytest.raises(ConfigError, match=f"a batch already has a {name!r}"):
        make(str(tmp_path), fields=("png", name), **options)
    assert next(make(str(tmp_path), fields=("png",), **options).epoch(0))["png"] == [b"x"]


@pytest.fixture
def poisoned(tmp_path):
    """Number 5 is stored as it was written, and is no image."""
    samples = png_samples("train", 40, size=16)
    samples[5] = image_sample("train", 5, b"\x89PNG\r\n\x1a\n nothing like one", "png", 10)
    new_set(samples, tmp_path, num_shards=2)
    return str(tmp_path)


def test_a_sample_that_is_no_image_stops_the_run_with_its_name_where_its_batch_would_have_come(
    poisoned,
):
    stream = make(poisoned)
    bad_step = next(step for step in range(len(stream)) if 5 in stream.order.batch(0, step).ids)
    batches = stream.epoch(0)
    assert len(list(itertools.islice(batches, bad_step))) == bad_step
    with pytest.raises(
        UndecodableImage, match=r"train/train-000000.tar: sample 'train-000005' at byte \d+"
    ):
        next(batches)


def test_a_masked_sample_keeps_its_slot_black_with_weight_zero(poisoned, caplog):
    batches = list(make(poisoned, bad_samples="mask").epoch(0))
    found = together(batches)
    assert len(found["id"]) == 48
    assert (found["weight"][found["id"] == 5] == 0).all()
    assert (found["image"][found["id"] == 5] == 0).all()
    assert found["weight"].sum() == 39
    assert "train-000005" in caplog.text


def test_samples_of_a_missing_shard_are_masked_one_by_one(tmp_path):
    samples = png_samples("train", 120, size=16)
    for url in (new_set(samples, tmp_path, num_shards=4), new_set(samples, num_shards=4)):
        open_storage(url).delete("train/train-000001.tar")
        found = together(list(make(url, bad_samples="mask").epoch(0)))
        is_lost = (found["id"] >= 30) & (found["id"] < 60)
        assert sorted(found["id"]) == list(range(120))
        assert found["weight"].tolist() == (~is_lost).tolist()


def test_closing_a_stream_ends_its_threads(shards):
    before = set(threading.enumerate())
    batches = make(shards).epochs()
    next(batches)
    assert any(thread.name.startswith("shardset-") for thread in threading.enumerate())
    batches.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=300)
    assert set(threading.enumerate()) <= before


def test_more_readers_than_lanes_are_warned_of_what_they_read_twice(shards, caplog):
    make(shards, num_lanes=2, world_size=4, global_batch_size=8)
    assert "4 readers share the 2 lanes of this order, so they read up to 2.00 times" in caplog.text
    caplog.clear()
    make(shards, world_size=4, global_batch_size=8)
    assert "readers share" not in caplog.text


def test_the_memory_of_a_stream_is_logged_and_kept(shards, caplog):
    caplog.set_level(logging.INFO, logger="shardset")
    stream = make(shards, budget_bytes=2 << 20)
    assert "memory: " in caplog.text
    assert stream.memory.total <= 2 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "does not have a sample for each of 0 replicas; use 1 to 12"),
        ({"world_size": 13}, "a global batch of 12 does not have a sample for each of 13 replicas"),
        ({"rank": 1}, "rank is 1, expected 0 to 0"),
        ({"num_lanes": 5}, "not a multiple of 5 lanes"),
        ({"num_lanes": 0}, "num_lanes is 0, expected at least 1"),
        ({"augment_repeats": 5}, "not a multiple of 2 lanes times 5 repeats; use 10, or 2 lanes"),
        (
            {"augment_repeats": 3, "num_lanes": 3},
            "not a multiple of 3 lanes times 3 repeats; use 9, or 4 lanes",
        ),
        ({"fields": ("json",)}, "no field 'json'"),
        ({"seed": None, "window": 0}, "takes no random crop"),
        ({"global_batch_size": 0}, "the global batch size is 0"),
        ({"num_threads": -1}, "num_threads is -1, expected at least 1"),
        ({"prefetch": -1}, "prefetch is -1, expected at least 0"),
        ({"bad_samples": "skip"}, "bad_samples is 'skip', expected raise or mask"),
        ({"last_batch": "keep"}, "last_batch is 'keep', expected pad or drop"),
        ({"world_size": None}, "world_size is None, expected a whole number"),
        ({"window": 2.5}, "window is 2.5, expected a whole number"),
        ({"image": 224}, r"image is 224, expected ImageSpec\(size=\.\.\.\), or None"),
        ({"fields": "png"}, r"fields is 'png', expected several, such as \('png',\)"),
    ],
)
def test_options_that_do_not_fit_are_refused(shards, options, message):
    with pytest.raises(ConfigError, match=message):
        make(shards, **options)


def test_steps_may_be_named_twice_and_in_any_order(shards):
    stream = make(shards, image=None)
    whole = list(stream.epoch(0))
    spans = [range(3), range(3), range(5, 6), range(2, 9, 3), range(9)]
    found = list(stream.run((0, steps) for steps in spans))
    assert [step for _, step, _ in found] == list(itertools.chain(*spans))
    assert all(same(batch, whole[step]) for _, step, batch in found)


@pytest.mark.parametrize(
    ("epoch", "steps"), [(0, range(-2, 3)), (0, range(8, 11)), (-1, range(2)), (0, range(3, 0, -1))]
)
def test_steps_that_no_epoch_has_are_refused(shards, epoch, steps):
    with pytest.raises(ConfigError, match="expected some of 0 to 8"):
        list(make(shards).run([(epoch, steps)]))


def test_a_stream_that_waits_for_its_indexes_is_interrupted_without_them():
    asked, held, gave_up = threading.Semaphore(0), threading.Event(), []

    def hold(*_):
        asked.release()
        gave_up.append(not held.wait(600))

    def interrupt():
        for _ in range(2):
            asked.acquire()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    url = new_set(png_samples("train", 20, size=16), num_shards=4)
    stream = make(url, image=None)
    stream.source.table.storage = RecordingStorage(stream.source.table.storage, before=hold)
    batches = stream.epoch(0)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert not gave_up
    waiting = [
        thread for thread in threading.enumerate() if thread.name.startswith("shardset-many")
    ]
    assert len(waiting) > 1
    assert all(thread.daemon for thread in waiting)
    held.set()
    for thread in waiting:
        thread.join()


def test_numbers_of_numpy_are_as_good_as_python_s(shards):
    numbers = dict.fromkeys(("rank", "prefetch", "num_threads"), 1)
    numbers |= {"global_batch_size": 12, "world_size": 2, "num_lanes": 4}
    small = make(shards, **{name: np.uint8(number) for name, number in numbers.items()})
    assert all_same(small.epoch(np.uint8(1), np.int8(2)), make(shards, **numbers).epoch(1, 2))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("1", 0), "epoch is '1', expected a whole number"),
        ((1, 1.5), "step is 1.5, expected a whole number"),
        ((1, 10), "step 10 of an epoch .* 0 to 9.*counted from its start"),
        ((1, -1), "step -1 of an epoch .* 0 to 9.*counted from its start"),
    ],
)
def test_a_start_that_no_epoch_has_is_refused(shards, place, message):
    stream = make(shards)
    for begin in (stream.epoch, stream.epochs):
        with pytest.raises(ConfigError, match=message):
            begin(*place)


def test_a_stream_that_drops_all_it_has_is_refused(shards):
    size = NUM_TRAIN + 12 - NUM_TRAIN % 12
    with pytest.raises(ConfigError, match=f"{NUM_TRAIN} samples do not fill one batch of .*'pad'"):
        make(shards, global_batch_size=size, num_lanes=12, last_batch="drop")


@pytest.fixture(scope="module")
def many():
    """2,000 samples in a bucket: enough for the borders of blocks not to count."""
    image = encode(pixels(1, 16, 16), "png")
    samples = [image_sample("train", number, image, "png", 10) for number in range(2000)]
    return new_set(samples, num_shards=4)


@pytest.mark.parametrize("world", [4, 16])
def test_an_epoch_reads_hardly_more_than_is_stored_in_any_world_that_divides_the_lanes(many, world):
    numbers = {"global_batch_size": 16, "num_lanes": 16, "block_size": 8, "window": 8}
    options = {"world_size": world, "image": None, "fields": ("png",), **numbers}
    streams = [make(many, rank=rank, **options) for rank in range(world)]
    with BytesRead() as count:
        found = together([batch for stream in streams for batch in stream.epoch(0)])
    assert sorted(found["id"][found["weight"] == 1]) == list(range(2000))
    assert count.total <= 1.05 * streams[0].split.num_tar_bytes
