"""Worker processes of a local build: their deaths are seen, and none outlives the build."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.runners.local import WorkerGroup
from shardset.format import naming
from tests.conftest import REPOSITORY
from tests.makers.folders import write_class_folders
from tests.makers.lives import Life

NOBODY = {"CONTROL_API_SERVICE_DESCRIPTOR": 'url: "localhost:1"'}
"""Beam's worker tries for minutes to reach that."""


def wait_until(condition):
    """Waits for something that takes at most the import of Beam."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def group():
    group = WorkerGroup()
    yield group
    group.end()


def test_a_worker_that_fails_is_told_by_its_code(group):
    process = group.start({})  # Beam's worker misses the address to call
    assert group.wait(process) == group.first_failure(0) == 1


LAUNCHER = """
import os, sys
from pipelines.runners.local import WorkerGroup
process = WorkerGroup().start({"CONTROL_API_SERVICE_DESCRIPTOR": 'url: "localhost:1"'})
print(process.pid, os.environ.get("PYTHONSAFEPATH"), flush=True)
process.join(1)
os._exit(process.is_alive())
"""
"""Starts a worker, and is gone."""


@pytest.mark.slow
def test_a_worker_ends_with_its_launcher_and_imports_nothing_that_stands_in_its_folder(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit(3)")
    words = [sys.executable, "-P", "-c", LAUNCHER]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True
    )
    assert done.returncode == 1, done.stderr
    pid, safe_path = done.stdout.split()
    assert safe_path == b"None"
    wait_until(lambda: not Path(f"/proc/{int(pid)}").exists())


def test_nobody_has_failed_while_nobody_is_asked_for(group):
    assert group.first_failure(0) is None


def test_a_worker_that_is_killed_is_told_by_its_signal_and_the_others_live_on(group):
    first, second = group.start(NOBODY), group.start(NOBODY)
    first.kill()
    assert group.wait(first) == group.first_failure(0) == -signal.SIGKILL
    assert second.is_alive()
    assert "was killed (SIGKILL)" in group.record_exit(-signal.SIGKILL)
    assert group.wait(second) == -signal.SIGKILL


def test_a_worker_that_is_started_after_the_end_is_killed_at_once(group):
    group.end()
    assert group.wait(group.start(NOBODY)) == -signal.SIGKILL
    group.end()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "fork server", "worker"])
def test_nobody_is_left_of_a_build_that_dies_while_it_imports(victim, tmp_path):
    raw = write_class_folders(tmp_path / "raw", ["cat", "dog"], 4, splits=["train"])
    words = [
        "--source",
        "folder",
        "--input",
        raw,
        "--output",
        tmp_path / "out",
        "--direct_num_workers",
        2,
    ]
    with Life(words, tmp_path / "log") as life:
        wait_until(life.workers if victim == "worker" else life.fork_servers)
        life.kill(victim, random.Random(0))
        code, _, errors = life.wait()
        assert not life.wait_for_orphans()
    assert code == {"launcher": -signal.SIGKILL, "fork server": 0, "worker": 1}[victim], errors
    assert victim != "worker" or "ShardsetError: a worker process was killed (SIGKILL)" in errors
    # it is started again
    assert (tmp_path / "out" / naming.MANIFEST).exists() == (victim == "fork server")
