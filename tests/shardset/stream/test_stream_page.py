"""The Python lines of docs/explanation/reader.md, run in their order as they stand."""

import re
import uuid
from pathlib import Path

import pytest

from tests.makers.shardset import jpeg_samples, new_set

PAGE = Path(__file__).parents[3] / "docs/explanation/reader.md"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the sets that the page names; a bucket in memory stands for the one in the
    cloud.
    """
    bucket = f"memory://{uuid.uuid4().hex}/shards"
    for url, num_samples in (("shards", 900), ("others", 80), (bucket, 300)):
        samples = jpeg_samples("train", num_samples, height=24, width=32)
        new_set(samples, url if "//" in url else str(tmp_path / url))
    monkeypatch.chdir(tmp_path)
    return bucket


def test_the_lines_of_the_page_work(workplace):
    lines = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S))
    assert "gs://bucket/shards" in lines
    found: dict = {}
    exec(lines.replace("gs://bucket/shards", workplace), found)
    assert found["again"].state_dict() == found["saved"]
    assert found["images_NHWC"].shape == (256, 224, 224, 3)
    assert (found["batch"]["source"] == 0).sum() == 192
    assert len(next(found["cached"].epoch(0))["id"]) == 256
