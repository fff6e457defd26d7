"""`estimate`: its arithmetic against figures made by hand and against the order itself, its ways
in, its words.
"""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from pipelines import cli
from pipelines.build import build
from pipelines.config import BareNumbers, BuildConfig
from pipelines.estimate.estimate import Estimate, estimate
from pipelines.estimate.reading import Reading, classes_expected, classes_in
from pipelines.estimate.stored import StoredSet, from_manifest, from_numbers
from shardset.decode.crops import CenterCrop, PadCrop
from shardset.decode.image import ImageSpec
from shardset.stream.stream import Stream
from tests.makers.built import config_of
from tests.makers.folders import write_class_folders

DOCS = Path(__file__).parents[3] / "docs"
HERE = ["--direct_running_mode=in_memory"]
IMAGENET = 1_281_167
"""A prime number."""


WORLD = Reading(global_batch_size=4096, num_replicas=32, num_hosts=4)


def stored(samples: int = IMAGENET, **sizing) -> StoredSet:
    """What would be built of so many images."""
    config = BuildConfig(source="", input="", output="", **sizing)
    return from_numbers(
        config, BareNumbers(samples={"": samples}, mean_bytes=110_000, classes=1000)
    )


def numbers(reading: Reading = WORLD, **sizing) -> Estimate:
    """What is estimated from bare numbers; `reading` says how they are read."""
    return estimate(stored(**sizing), "train", reading)


def advice(found: Estimate) -> str:
    return "\n".join(found["advice"])


def test_imagenet_in_1024_shards_by_hand():
    found = numbers(num_shards={"": 1024})
    split = stored(num_shards={"": 1024}).splits["train"]
    # 1,281,167 = 1,024 x 1,251 + 143
    assert (split.shard_sizes.count(1252), split.shard_sizes.count(1251)) == (143, 881)
    # 1,281,167 = 312 x 4,096 + 3,215, and 4,096 - 3,215 = 881
    assert (
        found["steps"]["num_steps"],
        found["steps"]["num_last"],
        found["steps"]["num_pads"],
    ) == (313, 3215, 881)
    dropped = numbers(reading=replace(WORLD, last_batch="drop"))["steps"]
    assert (dropped["num_steps"], dropped["num_pads"], dropped["num_left_out"]) == (312, 0, 3215)
    # 512 header + 110,000 + about 256 padding + 1,024 for the label; 4 MiB / 111,793 = 37.5
    assert split.numbers.mean_bytes == pytest.approx(111_792, abs=2)
    assert (found["order"]["L"], found["order"]["q"]) == (256, 37)
    assert "drop leaves out 143 (1,281,024 = 1,024 x 1,251)" in advice(found)
    assert "pad repeats 881 (1,282,048 = 1,024 x 1,252)" in advice(found)


@pytest.mark.parametrize("window", [256, 0])
def test_mixing_is_the_figure_of_the_documentation(window):
    reading = Reading(global_batch_size=1024, num_lanes=256, block_size=38, window=window)
    found = numbers(num_shards={"": 640}, reading=reading)
    row = re.search(
        rf"^\| q = 38, w = {window}, 256 lanes.*?\| (\d+) \|",
        (DOCS / "explanation/order.md").read_text(),
        re.MULTILINE,
    )
    # There the larger shards stand between the smaller ones, here before them, as the build numbers
    # them.
    assert found["mixing"]["worst"] == pytest.approx(int(row[1]), abs=2)
    assert found["mixing"]["uniform"] == pytest.approx(642, abs=1)


def test_classes_expected_is_right_by_hand_and_what_drawing_gives():
    # Two of four samples of two classes: 2 of the 6 pairs are of one class, so a class is missed 1
    # time in 6.
    assert classes_expected(4, 2, 2) == pytest.approx(2 * (1 - 1 / 6))
    draw = np.random.default_rng(0)
    batches = (draw.choice(1000, 64, replace=False) for _ in range(400))
    assert classes_in(batches, 1000, 50) == pytest.approx(classes_expected(1000, 64, 50), rel=0.01)


def test_lanes_and_batches_that_do_not_divide_are_told():
    found = numbers(reading=Reading(global_batch_size=100, num_replicas=32, num_hosts=32))
    assert not found["refusal"]
    assert (
        "Batches of 100 over 32 replicas: 4 of them have 4 samples, the others one less and a"
        " repeat of weight 0." in found["advice"]
    )
    found = numbers(
        reading=Reading(global_batch_size=1536, num_replicas=24, num_hosts=24, num_lanes=256)
    )
    # 256 lanes over 24 readers: 10 2/3 each, so of the 23 borders all but those at multiples of a
    # third cut a lane
    assert found["amplification"] == pytest.approx(1 + 16 / 256)


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (
            Reading(global_batch_size=20, num_replicas=32),
            "does not have a sample for each of 32 replicas; use 1 to 20",
        ),
        (
            Reading(num_replicas=32, num_hosts=5),
            r"do not divide over 5 hosts; use a number of hosts that divides 32",
        ),
        (Reading(global_batch_size=65536), r"MiB decoded.*raise budget_bytes"),
    ],
)
def test_what_a_run_would_refuse_is_refused_and_the_rest_still_shown(reading, message):
    found = numbers(reading=reading)
    assert re.search(message, found["refusal"])
    assert found["steps"]["num_steps"]
    assert found["memory"] is None


def test_a_budget_that_narrows_the_order_is_named():
    found = numbers(num_shards={"": 1024}, reading=Reading(global_batch_size=4096))
    assert found["order"]["w"] == 47
    assert "lowers w from 256 to 47" in advice(found)
    wide = numbers(
        num_shards={"": 1024}, reading=Reading(global_batch_size=4096, budget_bytes=2**36)
    )
    assert (wide["order"]["L"], wide["order"]["w"]) == (256, 256)
    assert "lowers w" not in advice(wide)
    assert wide["mixing"]["worst"] > 1.2 * found["mixing"]["worst"]


def test_the_memory_cache_is_as_large_as_the_real_one(built):
    reading = Reading(global_batch_size=8, image_size=8, crop_padding=4)
    image = ImageSpec(size=8, crop=PadCrop(4))
    with Stream(built.output, "train", batch_size=8, image=image) as stream:
        next(iter(stream))
        images = stream.aids.cache.images_NHWC
        assert (
            estimate(from_manifest(built.output), "train", reading)["memory"]["cache"]
            == images.nbytes
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> BuildConfig:
    """A built set of 50 images: the raw files are in `input`."""
    folder = tmp_path_factory.mktemp("built")
    raw = write_class_folders(folder / "raw", ["cat", "dog"], 25)
    config = config_of(raw, folder / "out", num_shards={"": 4}, remainder="pad")
    build(config, HERE)
    return config


def test_numbers_foresee_what_a_build_makes(built):
    mean_bytes = fmean(path.stat().st_size for path in Path(built.input).rglob("*.*"))
    bare = BareNumbers(samples={"train": 50}, mean_bytes=mean_bytes, classes=2)
    numbers = from_numbers(built, bare)
    foreseen, made = numbers.splits["train"], from_manifest(built.output).splits["train"]
    assert foreseen.shard_sizes == made.shard_sizes
    assert foreseen.numbers.num_dropped == made.numbers.num_dropped
    assert foreseen.numbers.num_repeats == made.numbers.num_repeats
    assert foreseen.numbers.num_bytes == pytest.approx(made.numbers.num_bytes, rel=0.15)


@pytest.mark.parametrize("num_readers", [1, 2, 4])
def test_a_stream_has_the_steps_and_the_memory_that_were_foreseen(built, num_readers):
    options: dict = {"global_batch_size": 16, "num_lanes": 8, "block_size": 5, "window": 6}
    reading = Reading(num_replicas=4, num_hosts=num_readers, image_size=16, **options)
    foreseen = estimate(from_manifest(built.output), "train", reading)
    image = ImageSpec(size=16, crop=CenterCrop(16))
    streams = [
        Stream(
            built.output, "train", rank=rank, world_size=num_readers, seed=0, image=image, **options
        )
        for rank in range(num_readers)
    ]
    assert {len(stream) for stream in streams} == {foreseen["steps"]["num_steps"]}
    assert foreseen["memory"] in [
        asdict(stream.memory) | {"total": stream.memory.total} for stream in streams
    ]


FOUR = ["--global-batch-size", "4096", "--num-replicas", "4", "--num-hosts", "4"]
BARE = ["--samples", "train=1281167,validation=50000", "--mean-bytes=110000", "--classes=1000"]


def test_the_page_fits_80_columns_and_says_what_matters(said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sizes = ["--num-shards", "train=640,validation=50", "--remainder", "pad"]
    world = ["--global-batch-size", "4096", "--num-replicas", "32", "--num-hosts", "4"]
    page = said("estimate", *BARE, *sizes, *world)
    assert max(map(len, page.splitlines())) <= 80
    assert "…" not in page
    for words in ("1,281,280", "313 an epoch", "4 readers", "3.8 GB"):
        assert words in page


def test_the_numbers_come_as_json_too(said):
    sizes = ["--num-shards", "train=1024,validation=50"]
    found = json.loads(said("estimate", *BARE, *sizes, "--json", *FOUR))
    assert found["splits"]["train"]["num_shards"] == 1024
    assert found["steps"] == {
        "num_steps": 313,
        "num_last": 3215,
        "num_pads": 881,
        "num_left_out": 0,
    }
    assert found["read_bytes"] == found["splits"]["train"]["num_bytes"]
    assert found["assumption"].startswith("images are JPEGs")


def test_a_manifest_is_enough_without_anything_else_of_the_set(built, tmp_path, said):
    shutil.copy(Path(built.output, "manifest.json"), tmp_path)
    text = said("estimate", tmp_path, "--global-batch-size", "4", "--json")
    assert json.loads(text)["steps"]["num_steps"] == 13


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory://empty/folder"], "no manifest there"),
        (["--samples", "100"], "--samples needs --mean-bytes too"),
        (
            ["--samples", "100", "--mean-bytes", "0.5"],
            "mean_bytes is 0.5, expected finite float >= 1",
        ),
        (["--samples", "100", "--mean-bytes", "nan"], "mean_bytes is nan"),
        (["--samples", "5,train=7", "--mean-bytes", "9"], "names the split train twice"),
        (["--samples", "a/b=7", "--mean-bytes", "9"], "'a/b' can't name a split"),
        (["somewhere", "--classes", "7"], "--classes goes with --samples"),
        (["somewhere", "--num-shards", "7"], "--num-shards goes with --samples"),
        ([*BARE, "--split", "test"], "no split 'test'; there are train, validation"),
        (["--samples", "5", "--mean-bytes", "9", "--num-shards", "6"], "can't fill 6 shard(s)"),
        ([*BARE, "--num-lanes", "7"], "is not a multiple of 7 lanes"),
        ([*BARE, "--window", "-1"], "window is -1"),
        ([*BARE, "--image-size", "-1"], "image_size is -1"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_code_2(words, message, capsys):
    code, printed = cli.main(["estimate", *words]), capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1
