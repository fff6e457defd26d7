"""The Python lines of three pages, run in their order as they stand, with smaller batches, and
the examples of docstrings.

They run in a separate process: JAX starts threads, which the forks of later tests would not
survive. The lines for DALI need another library: tests/peers runs them.
"""

import sys

import pytest

from tests.makers.documented import page, python_of, run

OF_STREAM = """
assert again.state_dict() == saved
assert images_NHWC.shape == (256, 224, 224, 3)
assert (batch["source"] == 0).sum() == 192
assert len(next(cached.epoch(0))["id"]) == 256
"""
OF_LOOP = """
assert num_samples == 21
assert again.state_dict() == again.state(1, 1)
assert len(np.unique([next(part.epoch(0))["id"] for part in parts])) == 16
larger = shardset.Stream("photos", "train", batch_size=16, image_size=288)
larger.load_state_dict(again.state_dict())  # progressive resizing
assert next(iter(larger))["image"].shape == (16, 288, 288, 3)
assert images_NHWC.shape == (16, 32, 32, 3)
assert sample.id == 17
assert image.shape == (40, 50, 3)
assert [row["is_even"] for row in rows].count(True) == 35
assert state["epoch"] == 0
assert isinstance(batch["image"], jax.Array) and batch["image"].shape == (16, 32, 32, 3)
"""
OF_TARGETS = """
np.testing.assert_allclose(back, points, atol=1e-3)
assert (moved.round() != points).any()
assert len(targets) == 4 and targets[0]["labels"].tolist() == [0]
assert next(iter(stream))["local"].shape == (8, 6, 48, 48, 3)
"""
FRAMEWORKS = "docs/how-to/frameworks.md"  # goes on where the page of loops ends
BUCKET = "memory://bucket/shards"  # stands for the one in the cloud
SMALLER = {
    "gs://bucket/photos": "photos",
    "batch_size=256": "batch_size=16",
    "batch_size=64": "batch_size=4",
    "image_size=224": "image_size=32",
}
PAGES = {
    "explanation/reader": (
        {"shards": {"train": 900}, "others": {"train": 80}, BUCKET: {"train": 300}},
        {"gs://bucket/shards": BUCKET}, OF_STREAM),
    "how-to/targets": ({}, {}, OF_TARGETS),
    "how-to/loop": ({"photos": {"train": 70, "val": 21}}, SMALLER, OF_LOOP),
}  # fmt: skip
WRITE_SETS = """
from tests.makers.shardset import jpeg_samples, new_set
for url, sizes in {sets}.items():
    new_set({{split: jpeg_samples(split, size, height=40, width=50)
        for split, size in sizes.items()}}, url)
"""
EXAMPLES = """
import doctest, importlib, shardset
library = [*shardset._READER, "format.manifest.loading", "storage.open"]
adapters = ["adapters.grain", "adapters.jax", "adapters.torch", "adapters.webdataset"]
for name in {part}:
    found = doctest.testmod(importlib.import_module("shardset." + name), globs={{}})
    assert found.attempted and not found.failed
"""


@pytest.mark.parametrize("part", ["library", pytest.param("adapters", marks=pytest.mark.slow)])
def test_the_examples_of_public_docstrings_work(part, tmp_path):
    sets = {url: {"train": 20} for url in ("shards", "others", BUCKET)}
    run([sys.executable, "-c", (WRITE_SETS + EXAMPLES).format(sets=sets, part=part)], tmp_path)


@pytest.mark.parametrize(
    "name",
    ["explanation/reader", "how-to/targets", pytest.param("how-to/loop", marks=pytest.mark.slow)],
)
def test_the_lines_of_the_page_work(name, tmp_path):
    sets, replaced, checks = PAGES[name]
    adapters = "" if name != "how-to/loop" else page(FRAMEWORKS, stop="## NVIDIA DALI")
    lines = "".join(python_of(page(f"docs/{name}.md") + adapters))
    for written, here in replaced.items():
        assert written in lines
        lines = lines.replace(written, here)
    run([sys.executable, "-c", WRITE_SETS.format(sets=sets) + lines + checks], tmp_path)
