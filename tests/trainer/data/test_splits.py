from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from shardset.errors import ConfigError, ManifestError
from shardset.format.manifest import load
from tests.makers.shardset import new_set, png_samples
from tests.makers.training import NUM_TRAIN, tiny_config
from tests.makers.views import put_view
from trainer.config import ImageConfig
from trainer.data import splits
from trainer.data.epochs import SampleDigest, check_epoch, steps_of
from trainer.data.splits import open_data


@pytest.fixture(autouse=True)
def few_synthetic_samples(monkeypatch):
    monkeypatch.setattr(splits, "NUM_SAMPLES", NUM_TRAIN)


def opened(manifest, num_hosts, *, fake, **changes: Any):
    """The data of each host of a run, from a shard set or synthetic."""
    config = tiny_config(None if fake else manifest, "run", fake_data=fake, **changes)
    return config, [open_data(config, host, num_hosts) for host in range(num_hosts)]


@pytest.mark.parametrize(
    ("hosts", "repeats", "fake"), [(1, 1, False), (4, 1, False), (2, 3, False), (2, 3, True)]
)
def test_an_epoch_of_all_hosts_has_the_samples_and_the_weights_that_are_expected(
    manifest, hosts, repeats, fake
):
    image = ImageConfig(size=8, train_crop="pad", eval_resize=8, augment_repeats=repeats)
    config, data = opened(manifest, hosts, fake=fake, global_batch_size=6, image=image)
    num_steps, seen = -(-repeats * NUM_TRAIN // 6), SampleDigest()
    weights = np.zeros(num_steps)
    for one in data:
        assert len(one.train) == num_steps
        for _, step, batch in steps_of(one.train, 0, num_steps):
            seen = seen.add(batch["id"][batch["weight"] > 0])
            weights[step] += batch["weight"].sum()
    check_epoch(0, data[0].expected(0), seen)
    assert seen.samples == repeats * NUM_TRAIN == weights.sum()
    size = config.global_batch_size
    assert weights.tolist() == [data[0].weight_of_step(step, size) for step in range(num_steps)]


def test_the_budget_of_a_run_is_that_of_both_streams_and_makes_their_order(manifest):
    wide, narrow = (
        open_data(tiny_config(manifest, "run", budget_bytes=size), 0, 1)
        for size in (1 << 30, 180_000)
    )
    streams: list = [narrow.train, narrow.evaluation, wide.train]
    assert streams[0].order.window < streams[2].order.window
    assert {stream.memory.budget for stream in streams[:2]} == {180_000}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"manifest": None}, "--manifest"),
        ({"train_split": "trian"}, "no split 'trian' in this shard set; it has train, val"),
        ({"manifest": "memory://nothing/here"}, "no manifest"),
    ],
)
def test_data_that_is_not_there_or_does_not_fit_is_refused(manifest, changes, message):
    with pytest.raises((ConfigError, ManifestError), match=message):
        open_data(replace(tiny_config(manifest, "run"), **changes), 0, 1)


def test_a_set_without_a_split_to_evaluate_on_is_refused_with_what_makes_one():
    url = new_set(png_samples("train", 20, size=8))
    config = tiny_config(url, "run", eval_split=None)
    with pytest.raises(
        ConfigError,
        match=r"only 'train'; build it again with --holdout test=0.1, or .* eval_split=train",
    ):
        open_data(config, 0, 1)
    assert open_data(replace(config, eval_split="train"), 0, 1).num_eval_samples == 20


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train", "test", "dev", "extra"], "dev"),
        (["train", "valid", "val"], "val"),
        (["train", "test"], "test"),
        (["train", "test", "extra"], None),
    ],
)
def test_a_run_evaluates_on_the_split_for_tuning_or_asks_for_a_name(names, expected):
    url = new_set({name: png_samples(name, 20 + len(name), size=8) for name in names})
    config = tiny_config(url, "run", eval_split=None)
    if expected is None:
        with pytest.raises(ConfigError, match=r"which split to evaluate on\?.* name one with"):
            open_data(config, 0, 1)
    else:
        assert open_data(config, 0, 1).num_eval_samples == 20 + len(expected)


@pytest.mark.parametrize("without", ["train", "val"])
def test_a_split_with_samples_that_have_no_label_is_refused(without):
    splits = {"train": png_samples("train", 20, size=8), "val": png_samples("val", 20, size=8)}
    splits[without][4:7] = [
        msgspec.structs.replace(sample, fields=sample.fields[:1], label=-1)
        for sample in splits[without][4:7]
    ]
    url = new_set(splits)
    with pytest.raises(ConfigError, match=f"is '{without}', where 3 of 20 samples have no label"):
        open_data(tiny_config(url, "run"), 0, 1)
    refusal = pytest.raises(
        ConfigError, match=f"is '{without}', where 2 of 10 samples have no label"
    )
    # the labels of a view count, not those of its set
    for label, expected in (2, nullcontext()), (-1, refusal):
        view = put_view(
            url, load(url), head={"split": without}, id=range(10), label=[label] * 2 + [3] * 8
        )
        with expected:
            open_data(tiny_config(view, "run"), 0, 1)


def test_fake_batches_look_like_real_ones(manifest):
    real = next(steps_of(open_data(tiny_config(manifest, "run"), 0, 4).train, 0, 7))[2]
    fake = next(steps_of(open_data(tiny_config(None, "run", fake_data=True), 0, 4).train, 0, 7))[2]
    assert {name: (array.shape, array.dtype) for name, array in real.items()} == {
        name: (array.shape, array.dtype) for name, array in fake.items()
    }


def test_the_streams_of_a_run_keep_what_they_read_where_the_config_says(tmp_path):
    splits = ("train", "val")
    url = new_set({name: png_samples(name, 20, size=8) for name in splits})
    config = replace(
        tiny_config(url, tmp_path), cache_dir=str(tmp_path / "cache"), cache_bytes=1 << 20
    )
    opened = open_data(config, 0, 1)
    for stream in (opened.train, opened.evaluation):
        for _ in stream.run(iter([(0, range(len(stream)))])):
            pass
    assert len([path for path in (tmp_path / "cache").glob("*/*") if path.name.isdigit()]) == 4


def test_images_of_training_are_augmented_and_those_of_an_evaluation_are_not(manifest):
    plain = tiny_config(manifest, "run")
    image = replace(plain.image, auto_augment="rand-m9-mstd0.5-inc1", erase=0.5)

    def images_of(config, name):
        stream = getattr(open_data(config, 0, 1), name)
        return np.concatenate([batch["image"] for _, _, batch in steps_of(stream, 0, len(stream))])

    augmented = replace(plain, image=image)
    differ = images_of(plain, "train") != images_of(augmented, "train")
    assert differ.any(axis=(1, 2, 3)).mean() > 0.5
    assert (images_of(plain, "evaluation") == images_of(augmented, "evaluation")).all()


def test_an_evaluation_may_have_larger_images_than_training(manifest):
    image = replace(tiny_config(manifest, "run").image, eval_resize=16, eval_size=12)
    for config in (
        tiny_config(manifest, "run", image=image),
        tiny_config(None, "run", fake_data=True, image=image),
    ):
        opened = open_data(config, 0, 1)
        shapes = [
            next(steps_of(stream, 0, 1))[2]["image"].shape
            for stream in (opened.train, opened.evaluation)
        ]
        assert shapes == [(8, 8, 8, 3), (8, 12, 12, 3)]
