"""`transform=`: the caller's own change of each row, with keyed randomness, wherever rows are
decoded.
"""

import numpy as np
import pytest

from shardset.decode.crops import CenterCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError
from shardset.stream.decode_batch.finish import KeyedGenerator
from shardset.stream.stream import Stream
from tests.makers.shardset import image_sample, jpeg_samples, new_set, png_samples

WHOLE = ImageSpec(size=16, crop=CenterCrop(16))
NUM_TRAIN = 50


@pytest.fixture(scope="module", params=["small", "photographs", "bucket"])
def shards(request, tmp_path_factory):
    """Shard sets that are filled in one thread, in several, and from blocks."""
    url = None if request.param == "bucket" else tmp_path_factory.mktemp("set")
    size = {"height": 300, "width": 400, "quality": 100}
    samples = (
        jpeg_samples("train", NUM_TRAIN, **size)
        if request.param == "photographs"
        else png_samples("train", 50)
    )
    return new_set(samples, url, num_shards=3)


def make(url, transform, **options):
    return Stream(
        url,
        "train",
        **{"batch_size": 12, "image": WHOLE, "transform": transform, "num_threads": 3, **options},
    )


def noisy(row, rng):
    """A row as a training loop wants it: float, channels first, with noise."""
    image = row["image"].astype(np.float32).transpose(2, 0, 1) / 255 + rng.normal(
        size=(3, 1, 1)
    ).astype(np.float32)
    return {
        "image": image,
        "label": row["label"],
        "draw": rng.random(),
        "name": f"sample {row['id']}",
    }


def by_id(batches):
    return {
        (int(id_), name): values[slot]
        for batch in batches
        for slot, id_ in enumerate(batch["id"])
        for name, values in batch.items()
        if name != "weight"
    }


def test_what_a_transform_returns_is_stacked(shards):
    plain, batch = next(make(shards, None).epoch(0)), next(make(shards, noisy).epoch(0))
    assert sorted(batch) == ["draw", "id", "image", "label", "name", "weight"]
    assert (batch["image"].shape, batch["image"].dtype) == ((12, 3, 16, 16), np.float32)
    assert (batch["draw"].shape, batch["draw"].dtype) == ((12,), np.float64)
    assert batch["name"] == [f"sample {id_}" for id_ in plain["id"]]
    for name in ("id", "label", "weight"):
        assert np.array_equal(batch[name], plain[name])
        assert batch[name].dtype == plain[name].dtype


def test_a_transform_may_change_the_image_in_place(shards):
    def inverted(row, rng):
        row["image"][:] = 255 - row["image"]
        return row

    for plain, batch in zip(
        make(shards, None).epoch(1), make(shards, inverted).epoch(1), strict=True
    ):
        assert np.array_equal(batch["image"], 255 - plain["image"])
        assert batch.keys() == plain.keys()


def test_the_randomness_differs_between_samples_epochs_and_seeds(shards):
    batches = [
        batch
        for seed in (0, 1)
        for epoch in (0, 1)
        for batch in make(shards, noisy, seed=seed).epoch(epoch)
    ]
    draws = np.concatenate([batch["draw"][batch["weight"] == 1] for batch in batches])
    assert len(np.unique(draws)) == 4 * NUM_TRAIN


def test_evaluation_draws_the_same_in_every_epoch(shards):
    first, second = (by_id(make(shards, noisy, seed=None).epoch(epoch)) for epoch in (0, 3))
    assert all(np.array_equal(value, second[key]) for key, value in first.items())


def test_the_numbers_of_a_transform_are_frozen(tmp_path):
    # Those of every existing run. NumPy keeps the bits of Philox for ever.
    new_set(png_samples("train", 4), tmp_path)
    stream = make(
        str(tmp_path),
        lambda row, rng: {"bits": np.uint64(rng.bit_generator.random_raw())},
        batch_size=4,
        seed=7,
    )
    batch = next(stream.epoch(2))
    assert dict(sorted(zip(batch["id"].tolist(), batch["bits"].tolist(), strict=True))) == {
        0: 7659341007258654410,
        1: 9885623250838549116,
        2: 12812826334639334471,
        3: 1038570846267505311,
    }


@pytest.mark.parametrize("key", [0, 5, 2**64 - 1])
def test_a_generator_that_is_set_to_a_key_is_a_new_one_of_that_key(key):
    generator = KeyedGenerator()
    for _ in range(2):
        fresh, again = np.random.Generator(np.random.Philox(key=key)), generator.at(key)
        for rng in (fresh, again):
            rng.integers(10, size=3, dtype=np.uint32)  # leaves half a number behind
        assert np.array_equal(again.normal(size=5), fresh.normal(size=5))
        assert again.integers(10, dtype=np.uint32) == fresh.integers(10, dtype=np.uint32)


def test_fields_and_keys_reach_a_transform(shards):
    def text(row, rng):
        return {"text": f"{row['key']}={row['cls'].decode()}"}

    batch = next(make(shards, text, image=None, fields=("cls",), with_key=True).epoch(0))
    assert batch["text"] == [f"train-{id_:06d}={id_ % 10}" for id_ in batch["id"]]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda row, rng: None, "transform returned NoneType, expected the row"),
        (
            lambda row, rng: {"x": np.zeros(row["id"] % 2)},
            r"'x' of float64 \[[01]\] for one row and 'x' of float64 \[[01]\]",
        ),
        (
            lambda row, rng: {f"x{row['id'] % 2}": 1},
            r"returned 'x[01]' of int64 \[\] for one row and 'x[01]' of",
        ),
        (lambda row, rng: {"x": None if row["id"] % 2 else 1}, "'x' of (no array|int64) "),
    ],
)
def test_rows_that_do_not_stack_are_refused(shards, transform, message):
    with pytest.raises(ConfigError, match=message):
        list(make(shards, transform).epoch(0))


def test_an_error_of_a_transform_names_its_sample(shards):
    def fails(row, rng):
        return {"x": 1 / (row["id"] - 7)}

    with pytest.raises(ZeroDivisionError) as raised:
        list(make(shards, fails).epoch(0))
    assert "in the transform of sample 7, epoch 0, step " in raised.value.__notes__[0]


def test_a_bad_sample_still_raises_its_own_error(tmp_path):
    samples = png_samples("train", 20)
    samples[5] = image_sample("train", 5, b"no image", "png", 10)
    new_set(samples, tmp_path)
    batches = list(make(str(tmp_path), noisy, bad_samples="mask").epoch(0))
    assert sum(batch["weight"].sum() for batch in batches) == 19
    assert all(batch["image"].shape == (12, 3, 16, 16) for batch in batches)
    with pytest.raises(Exception, match="train-000005"):
        list(make(str(tmp_path), noisy).epoch(0))
