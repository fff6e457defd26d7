"""The build on a real Spark cluster: a master and two workers, with a pool of Python workers."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pipelines.build import build
from scripts import spark
from scripts.job_server import REPOSITORY
from tests.makers import runners
from tests.makers.built import HERE, config_of
from tests.makers.ports import free_port
from tests.makers.stored import files_of

pytestmark = pytest.mark.nightly

NUM_WORKERS = 2
ENVIRONMENT = {
    "SPARK_HOME": str(spark.FOLDER),
    "SPARK_SCALA_VERSION": "2.12",
    "SPARK_LOCAL_IP": "127.0.0.1",
    # for the executors, which a worker starts
    "JDK_JAVA_OPTIONS": " ".join(
        f"--add-opens=java.base/{package}=ALL-UNNAMED"
        for package in ("java.lang", "java.lang.invoke", "java.nio", "java.util", "sun.nio.ch")
    ),
    # the pool starts its workers as `python`, which must be this one
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


@contextmanager
def running(log: Path, *command: object) -> Iterator[None]:
    """A process and all that it starts, which end with the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=REPOSITORY,
            env=os.environ | ENVIRONMENT,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def num_alive(page: str) -> int:
    try:
        with urllib.request.urlopen(f"{page}/json", timeout=10) as reply:
            return json.load(reply)["aliveworkers"]
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return 0


@pytest.fixture
def flags(tmp_path: Path) -> Iterator[list[str]]:
    """The flags of a build on a cluster that runs as long as the test."""
    java = ["java", "-Xmx512m", "-cp", f"{spark.FOLDER / 'jars'}/*"]
    deploy = "org.apache.spark.deploy"
    port, page, pool = (free_port() for _ in range(3))
    at = ["--host", "127.0.0.1", "--webui-port"]
    master = f"spark://127.0.0.1:{port}"
    with ExitStack() as exits:
        command = [*java, f"{deploy}.master.Master", *at, page, "--port", port]
        exits.enter_context(running(tmp_path / "master", *command))
        for number in range(NUM_WORKERS):
            command = [*java, f"{deploy}.worker.Worker", *at, free_port(), "-c", 1, "-m", "1g"]
            command += ["-d", tmp_path / f"work-{number}", master]
            exits.enter_context(running(tmp_path / f"worker-{number}", *command))
        command = [sys.executable, "-m", "scripts.flink_workers", f"127.0.0.1:{pool}"]
        exits.enter_context(running(tmp_path / "pool", *command))
        deadline = time.monotonic() + 120
        while num_alive(f"http://127.0.0.1:{page}") < NUM_WORKERS:
            assert time.monotonic() < deadline, (tmp_path / "master").read_text()
            time.sleep(0.2)
        yield [
            *(flag for flag in runners.SPARK if "master" not in flag),
            f"--spark_master_url={master}",
            "--environment_type=EXTERNAL",
            f"--environment_config=127.0.0.1:{pool}",
        ]


def test_spark_writes_and_counts_on_a_cluster_what_the_local_runner_does(raw, tmp_path, flags):
    expected = build(config_of(raw, tmp_path / "expected"), HERE)
    found = build(config_of(raw, tmp_path / "found"), flags)
    assert files_of(tmp_path / "found") == files_of(tmp_path / "expected")
    assert found.counters == expected.counters
    assert "Starting worker" in (tmp_path / "pool").read_text()
