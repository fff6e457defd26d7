"""Targets and views in a stream: the same on any world, after a resume, and in a bad sample."""

import logging
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

import shardset
from shardset import Boxes, CenterCrop, ImageSpec, Mask, RandAugment, RandomResizedCrop, Text
from tests.makers.documented import run
from tests.makers.shardset import encode, pixels

IMAGE = ImageSpec(size=24, crop=RandomResizedCrop(interpolation="bicubic"), flip="pixels")
TARGETS = {"boxes": Boxes("json", max_boxes=4), "mask": Mask("mask.png"), "text": Text("txt")}
NAMES = ("image", "boxes", "boxes_class", "mask", "text", "matrix", "orig_size")
NUM_SAMPLES, BATCH = 48, 24


def sample(number):
    rng = np.random.default_rng(number)
    height, width = map(int, rng.integers(30, 60, 2))
    boxes = [
        {"bbox": [*rng.uniform(0, 20, 2).tolist(), 9, 8.5], "category_id": int(rng.integers(3))}
        for _ in range(number % 4)
    ]
    mask = rng.integers(0, 5, (height, width), np.uint8)
    return {
        "image": encode(pixels(number, height, width), "JPEG"),
        "json": {"annotations": boxes},
        "fields": {"mask.png": encode(mask, "PNG"), "txt": f"number {number}".encode()},
    }


def written(path, changes=()):
    changes = dict(changes)
    with shardset.Writer(path, samples_per_shard=8) as writer:
        for number in range(NUM_SAMPLES):
            writer.write(**{**sample(number), **changes.get(number, {})})
    return path


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return written(tmp_path_factory.mktemp("targets") / "set")


def stream(url, **options):
    given: dict[str, Any] = {"global_batch_size": BATCH, "image": IMAGE, "targets": TARGETS}
    given |= {"with_matrix": True, "seed": 3, "num_lanes": 6}
    return shardset.Stream(url, "train", **(given | options))


def by_id(batches, names=NAMES):
    """What each sample of some batches has, by id."""
    return {
        int(one): {name: np.asarray(batch[name][slot]).tolist() for name in names}
        for batch in batches
        for slot, one in enumerate(batch["id"])
        if batch["weight"][slot]
    }


@pytest.mark.parametrize("world", [3, 8])
def test_any_world_gives_the_same_targets(url, world):
    expected = by_id(stream(url).epoch(1))
    assert len(expected) == NUM_SAMPLES
    parts = [stream(url, rank=rank, world_size=world) for rank in range(world)]
    assert by_id(batch for part in parts for batch in part.epoch(1)) == expected


def test_the_types_of_a_batch(url):
    batch = next(iter(stream(url)))
    kinds = {
        name: (batch[name].dtype.name, batch[name].shape[1:]) for name in NAMES if name != "text"
    }
    assert kinds == {
        "image": ("uint8", (24, 24, 3)),
        "boxes": ("float32", (4, 4)),
        "boxes_class": ("int64", (4,)),
        "mask": ("uint8", (24, 24)),
        "matrix": ("float32", (2, 3)),
        "orig_size": ("int32", (2,)),
    }
    assert batch["text"] == [f"number {one}" for one in batch["id"]]


def test_the_matrix_moves_the_boxes(url):
    for batch in stream(url):
        for slot, one in enumerate(batch["id"]):
            annotations = msgspec.convert(sample(int(one))["json"]["annotations"], list[dict])
            corners = np.array([each["bbox"] for each in annotations]).reshape(-1, 2, 2)
            corners[:, 1] += corners[:, 0]
            matrix = batch["matrix"][slot].astype(float)
            moved = np.sort(corners @ matrix[:, :2].T + matrix[:, 2], axis=1).clip(0, 24)
            seen = moved[(moved[:, 1] > moved[:, 0]).all(axis=1)].reshape(-1, 4)
            np.testing.assert_allclose(batch["boxes"][slot][: len(seen)], seen, atol=1e-4)
            assert (batch["boxes_class"][slot] >= 0).sum() == len(seen)


def test_a_sample_without_its_field_is_a_bad_sample(tmp_path, caplog):
    url = written(tmp_path / "set", {7: {"fields": {"mask.png": sample(7)["fields"]["mask.png"]}}})
    with pytest.raises(shardset.errors.BadTarget, match=r"000000007.*no field 'txt'"):
        list(stream(url))
    with caplog.at_level(logging.WARNING):
        batches = list(stream(url, bad_samples="mask").epoch(0))
    [(batch, slot)] = [(b, s) for b in batches for s in np.flatnonzero(b["id"] == 7)]
    assert batch["weight"][slot] == 0
    empty = {"image": 0, "boxes": 0, "boxes_class": -1, "mask": 255, "matrix": 0, "orig_size": 0}
    for name, value in empty.items():
        assert (batch[name][slot] == value).all(), name
    assert batch["text"][slot] == ""
    assert "000000007" in caplog.text


def test_too_many_boxes_stop_the_run_even_where_bad_samples_are_masked(url):
    targets = {"boxes": Boxes("json", max_boxes=1)}
    with pytest.raises(shardset.errors.ConfigError, match=r"sample '\d+' at .* boxes do not fit"):
        list(stream(url, targets=targets, bad_samples="mask"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": None}, "follow the crop"),
        ({"transform": RandAugment()}, "moves pixels and not the targets"),
        ({"transform": RandAugment(), "targets": {}}, "moves pixels and not the .* matrix"),
        ({"targets": {"boxes": "json"}}, "target 'boxes' is 'json', expected Boxes"),
        ({"targets": TARGETS | {"boxes_class": Text("txt")}}, "already has a 'boxes_class'"),
        ({"targets": {"boxes": Boxes("jsn")}}, "no field 'jsn'"),
        ({"targets": {"image": Text("txt")}}, "already has a 'image'"),
        ({"views": {"local": (2, IMAGE)}}, "image and views are both given"),
        ({"views": {"a": (0, IMAGE)}}, "'a' are .*at least 1"),
        ({"views": {"a": IMAGE}}, r"'a' are .*expected \(number, ImageSpec"),
        ({"views": {"a": (2, ImageSpec(size=8, flip="device"))}}, "flip False or 'pixels'"),
    ],
)
def test_options_that_do_not_go_together(url, options, message):
    with pytest.raises(shardset.errors.ConfigError, match=message):
        stream(url, **options)


def test_an_augmentation_that_moves_no_pixels_goes_with_targets(url):
    augmented = by_id(stream(url, transform=RandAugment(geometric=False, probability=1.0)))
    plain = by_id(stream(url))
    assert augmented.keys() == plain.keys()
    assert all(augmented[one]["mask"] == plain[one]["mask"] for one in plain)
    assert any(augmented[one]["image"] != plain[one]["image"] for one in plain)


def test_a_mixture_has_the_targets_of_each_set(url, tmp_path):
    other = written(tmp_path / "other", {one: sample(one + 100) for one in range(NUM_SAMPLES)})
    shares = [shardset.Share(str(each), "train", 1) for each in (url, other)]
    options: dict[str, Any] = {"targets": TARGETS, "with_matrix": True, "num_lanes": 6}
    parts = [
        shardset.MixedStream(
            shares, global_batch_size=BATCH, rank=rank, world_size=2, seed=1, image=IMAGE, **options
        )
        for rank in range(2)
    ]
    for part in parts:
        _, batch = next(part.batches())
        assert batch["mask"].shape == (BATCH // 2, 24, 24)
        for slot, (source, one) in enumerate(zip(batch["source"], batch["id"], strict=True)):
            assert batch["text"][slot] == f"number {one + 100 * source}"
            assert (batch["boxes_class"][slot] >= 0).sum() <= (one + 100 * source) % 4
        assert (batch["boxes_class"] >= 0).any()
    views = shardset.MixedStream(
        shares, global_batch_size=BATCH, rank=0, world_size=1, seed=1, views=VIEWS
    )
    _, batch = next(views.batches())
    assert batch["local"].shape == (BATCH, 6, 12, 12, 3)


VIEWS = {
    "global": (2, ImageSpec(size=24, flip="pixels")),
    "local": (6, ImageSpec(size=12, crop=RandomResizedCrop((0.05, 0.4)), flip="pixels")),
}


def test_views_have_draws_of_their_own_on_any_world(url):
    options = {"image": "auto", "targets": {}, "with_matrix": False, "views": VIEWS}
    whole = by_id(stream(url, **options).epoch(2), VIEWS)
    parts = [stream(url, rank=rank, world_size=3, **options) for rank in range(3)]
    assert by_id((batch for part in parts for batch in part.epoch(2)), VIEWS) == whole
    for views in whole.values():
        assert np.shape(views["global"]) == (2, 24, 24, 3)
        assert np.shape(views["local"]) == (6, 12, 12, 3)
        assert len({str(view) for view in views["local"]}) == 6
        assert views["global"][0] != views["global"][1]


def test_the_first_view_is_what_an_image_of_its_spec_is(url):
    """Up to the decoder: a view is cut out of the full-size image."""
    views = {"one": (1, ImageSpec(size=24, crop=CenterCrop(24)))}
    options = {"targets": {}, "with_matrix": False, "seed": None}
    found = by_id(stream(url, image="auto", views=views, **options), ["one"])
    expected = by_id(stream(url, image=views["one"][1], **options), ["image"])
    for one, rows in expected.items():
        np.testing.assert_allclose(found[one]["one"][0], rows["image"], atol=12)


ON_XLA = """
import sys
import torch, torch_xla
from torch_xla.debug import metrics
import shardset
from shardset.adapters.torch import TensorStream

stream = shardset.Stream(
    sys.argv[1], "train", batch_size=8, image_size=24, targets={"boxes": shardset.Boxes("json", 4)}
)
for batch in TensorStream(stream):
    sent = {name: each.to("xla") for name, each in batch.items()}
    found = sent["boxes_class"] >= 0
    areas = (sent["boxes"][..., 2:] - sent["boxes"][..., :2]).prod(-1)
    loss = (areas * found).sum() + sent["image"].float().mean()
    torch_xla.sync()
print(loss.item(), metrics.counter_value("UncachedCompile"))
"""


@pytest.mark.slow
def test_padded_boxes_need_one_graph(url):
    loss, graphs = run(
        [sys.executable, "-c", ON_XLA, str(url)], url.parent, PJRT_DEVICE="CPU"
    ).split()
    assert float(loss) > 0
    assert int(graphs) == 1
