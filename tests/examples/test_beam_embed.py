"""Embeddings of a set by a pipeline, as a column that a view asks for: on each runner the same."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import shardset
from examples.beam.embed import LENGTH, SIZE, Embedding
from scripts import flink
from tests.makers.documented import REPOSITORY, commands_of, page, python_of, run, run_all
from tests.makers.ports import free_port
from tests.makers.shardset import new_set, pixels, png_samples

NUM = 60
PRISM = REPOSITORY / ".tools/bin/prism"
SECTION = "\n## Read a set in a pipeline\n"


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """The address of a set that the page names."""
    samples = {"train": png_samples("train", NUM, size=SIZE), "test": png_samples("test", 9)}
    return new_set(samples, tmp_path / "shards", num_shards=4)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[flink.Cluster]:
    rest, rpc, pool = (free_port() for _ in range(3))
    jar = flink.FOLDER / flink.JOB_SERVER
    assert jar.exists(), "run `make flink` first"
    with flink.Cluster(tmp_path_factory.mktemp("flink"), jar, rest, rpc, pool) as found:
        yield found


def expected() -> np.ndarray:
    """The vectors of the images of `shards`, by the same model: float32 [NUM, LENGTH]."""
    torch.manual_seed(0)
    images_NHWC = np.stack([pixels(number, SIZE, SIZE) for number in range(NUM)])
    with torch.no_grad():
        vectors = Embedding()(torch.from_numpy(images_NHWC).permute(0, 3, 1, 2) / 255)
    return vectors.numpy()


def check(path: Path) -> None:
    """The file has the vector of each image."""
    rows = {row["key"]: row["embedding"] for row in pq.read_table(path).to_pylist()}
    found = [rows.pop(f"train-{number:06d}") for number in range(NUM)]
    np.testing.assert_allclose(found, expected(), atol=1e-5)
    assert not rows


@pytest.mark.slow
def test_the_page_reads_a_set_embeds_its_images_and_chooses_by_the_vectors(shards, tmp_path):
    text = page("docs/how-to/beam.md").partition(SECTION)[2].partition("\n## ")[0]
    [code] = python_of(text)
    with shardset.open(shards, "train") as samples:
        num_bytes = sum(len(sample.bytes) for sample in samples)
    assert run([sys.executable, "-c", code], tmp_path) == f"{num_bytes}\n"
    commands = [line for line in commands_of("docs/how-to/beam.md") if line in text]
    assert len(commands) == 4
    run_all(commands, tmp_path, {"examples/beam/": f"{REPOSITORY}/examples/beam/"})
    [rows] = tmp_path.glob("rows.parquet*")
    assert sum(row["size"] for row in pq.read_table(rows).to_pylist()) == num_bytes
    check(tmp_path / "embedding.parquet")
    cosines = expected()[:, 0] / np.linalg.norm(expected(), axis=1)
    loaded = shardset.load(str(tmp_path / "like-this.parquet"))
    chosen = loaded.part("train").rows.ids
    assert 0 < len(chosen) < NUM
    assert chosen.tolist() == np.flatnonzero(cosines > 0.2).tolist()
    stream = shardset.Stream(
        loaded, "train", batch_size=len(chosen), seed=None, image=None, columns=("embedding",)
    )
    [batch] = stream
    np.testing.assert_allclose(batch["embedding"], expected()[chosen], atol=1e-5)
    assert batch["embedding"].shape == (len(chosen), LENGTH)


@pytest.mark.nightly
@pytest.mark.parametrize("runner", ["processes", "prism", "flink"])
def test_every_runner_embeds_each_image_once(runner, shards, tmp_path, request):
    flags = {
        "processes": ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
        "prism": ["--runner=PrismRunner", f"--prism_location={PRISM}"],
    }
    words = flags[runner] if runner in flags else request.getfixturevalue("cluster").flags()
    output = tmp_path / "embedding.parquet"
    command = [sys.executable, "-m", "examples.beam.embed", f"--set={shards}", f"--output={output}"]
    run([*command, *words], REPOSITORY)
    check(output)
