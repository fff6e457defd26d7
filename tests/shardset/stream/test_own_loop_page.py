"""The Python lines of docs/your-own-loop.md, run in their order as they stand, with smaller batches and images."""

import re
import uuid
from pathlib import Path

import numpy as np
import pytest

from shardset.storage.open import open_storage
from shardset.stream.position import values_of_state
from tests.makers.shardset import jpeg_samples, write_shard_set

PAGE = Path(__file__).parents[3] / "docs" / "your-own-loop.md"
SMALLER = {"batch_size=256": "batch_size=16", "batch_size=64": "batch_size=4", "image_size=224": "image_size=32"}


@pytest.fixture
def names():
    """What the lines of the page leave behind; a bucket in memory stands for the one in the cloud."""
    bucket = f"memory://{uuid.uuid4().hex}/photos"
    samples = {"train": jpeg_samples("train", 70, height=40, width=50), "val": jpeg_samples("val", 21)}
    write_shard_set(open_storage(bucket), samples)
    lines = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S))
    for written, run in {"gs://bucket/photos": bucket, **SMALLER}.items():
        assert written in lines
        lines = lines.replace(written, run)
    left: dict = {}
    exec(lines, left)
    return left


def test_the_lines_of_the_page_work(names):
    again, parts = names["again"], names["parts"]
    assert names["num_samples"] == 21
    assert again.state_dict() == values_of_state(again.state(1, 1))
    ids = np.concatenate([next(part.epoch(0))["id"] for part in parts])
    assert len(np.unique(ids)) == 16
    assert names["images_NHWC"].shape == (16, 32, 32, 3)
    assert names["sample"].id == 17
    assert names["image"].shape == (40, 50, 3)
    assert [row["is_even"] for row in names["rows"]].count(True) == 35
    assert names["state"]["epoch"] == 0
    assert names["batch"]["image"].shape == (16, 32, 32, 3)
