"""The references of a shard: the file of each holds the samples of that shard alone."""

import re

import pyarrow as pa

from pipelines.build import build
from pipelines.plan import tables
from pipelines.plan.frames import open_frame
from tests.makers.built import HERE, config_of
from tests.makers.folders import write_images


def test_the_plan_of_a_shard_has_no_name_of_another_shards_samples(tmp_path):
    numbers = [f"{number:02d}{'x' * (number % 7)}" for number in range(20)]
    names = [f"{kind}/{number}.png" for kind in ("cat", "dog") for number in numbers]
    raw = write_images(tmp_path / "raw", names)
    build(config_of(raw, tmp_path / "set", num_shards={"": 8}), HERE)
    paths = [*tmp_path.glob("set/plan/shards/*.arrow")]
    assert len(paths) == 8
    for path in paths:
        data = path.read_bytes()
        with pa.ipc.open_stream(open_frame(data).content) as reader:
            rows = tables.values(reader.read_all().combine_chunks()["row"])
        for row in rows:
            data = data.replace(row, b"")
        assert not re.search(rb"(cat|dog)/", data)
