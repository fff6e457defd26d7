"""The build on a real Flink cluster of two machines: the bytes of the local runner, also after a
machine died.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.build import build
from pipelines.config import BuildConfig
from pipelines.plan import paths
from scripts import flink
from shardset.format import naming
from shardset.storage.open import open_storage
from tests.conftest import s3_environment
from tests.makers import imagenet
from tests.makers.cifar import cifar10, python_files
from tests.makers.ports import free_port
from tests.makers.shardset import put
from tests.makers.stored import files_of

pytestmark = pytest.mark.nightly

HERE = ["--direct_running_mode=in_memory"]
NUM_SHARDS = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, s3_server: str) -> Iterator[flink.Cluster]:
    rest, rpc, pool = (free_port() for _ in range(3))
    jar = flink.FOLDER / flink.JOB_SERVER
    assert jar.exists(), "run `make flink` first"
    folder = tmp_path_factory.mktemp("flink")
    environment = s3_environment(s3_server)
    with flink.Cluster(folder, jar, rest, rpc, pool, environment=environment) as found:
        yield found


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 of 200 training samples: six files, so six units to spread over the machines."""
    folder = tmp_path_factory.mktemp("raw") / "cifar-10-batches-py"
    return imagenet.put(folder, python_files(cifar10(rows=40)))


@pytest.fixture(scope="module")
def expected(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("expected")
    config = BuildConfig(
        source="cifar10",
        input=str(raw),
        output=str(output),
        num_shards={"": 4, "train": NUM_SHARDS},
    )
    build(config, HERE)
    return files_of(output)


def start_build(
    cluster: flink.Cluster, raw: Path | str, output: Path | str
) -> subprocess.Popen[str]:
    words = ["build", "--source=cifar10", f"--input={raw}", f"--output={output}", "--json"]
    command = [
        sys.executable,
        "-m",
        "pipelines",
        *words,
        f"--num-shards=4,train={NUM_SHARDS}",
        *cluster.flags(),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict:
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr[-3000:]
    return json.loads(stdout)


def wait_for_a_finished_shard(output: Path, process: subprocess.Popen[str]) -> None:
    while not any((output / paths.RECORDS).rglob("*.json")):
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.005)


def test_flink_writes_the_bytes_of_the_local_runner_on_both_machines(
    cluster, raw, expected, tmp_path
):
    counters = finish(start_build(cluster, raw, tmp_path / "out"))["counters"]
    assert files_of(tmp_path / "out") == expected
    assert (counters["shards_written"], counters["samples_written"]) == (NUM_SHARDS + 4, 240)
    for machine in (1, 2):
        assert "Starting worker" in (cluster.folder / "log" / f"workers-{machine}").read_text()


def test_flink_builds_from_s3_into_s3(cluster, raw, expected, s3_root):
    for path in raw.iterdir():
        put(open_storage(f"{s3_root}/raw"), path.name, path.read_bytes())
    finish(start_build(cluster, f"{s3_root}/raw", f"{s3_root}/out"))
    assert files_of(f"{s3_root}/out") == expected


def test_after_a_machine_died_the_build_fails_loudly_and_a_rerun_completes_it(
    cluster, raw, expected, tmp_path
):
    process = start_build(cluster, raw, tmp_path / "out")
    wait_for_a_finished_shard(tmp_path / "out", process)
    cluster.kill_machine(2)
    assert not (tmp_path / "out" / naming.MANIFEST).exists()
    stderr = process.communicate(timeout=600)[1]
    assert process.returncode == 1
    assert "ShardsetError: the job ended as FAILED" in stderr
    assert not (tmp_path / "out" / naming.MANIFEST).exists()
    cluster.restart_machine(2)
    counters = finish(start_build(cluster, raw, tmp_path / "out"))["counters"]
    assert counters["shards_skipped"] >= 1
    assert counters["shards_skipped"] + counters["shards_written"] == NUM_SHARDS + 4
    assert files_of(tmp_path / "out") == expected
