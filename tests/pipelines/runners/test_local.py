"""Worker processes of a local build: their deaths are seen, and none outlives the build."""

import random
import signal
import time

import pytest

from pipelines.runners.local import WorkerGroup
from shardset.format import naming
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


def test_what_stands_in_the_folder_of_the_command_is_not_imported_for_a_library(group, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert group.wait(group.start({})) == 1  # of the address that is missing, after all imports


def test_nobody_has_failed_while_nobody_is_asked_for(group):
    assert group.first_failure(0) is None


def test_a_worker_that_is_killed_is_told_by_its_signal_and_the_others_live_on(group):
    first, second = group.start(NOBODY), group.start(NOBODY)
    first.kill()
    assert group.wait(first) == group.first_failure(0) == -signal.SIGKILL
    assert second.poll() is None
    assert "was killed (SIGKILL)" in group.record_exit(-signal.SIGKILL)
    assert group.wait(second) == -signal.SIGKILL


def test_a_worker_that_is_started_after_the_end_is_killed_at_once(group):
    group.end()
    assert group.wait(group.start(NOBODY)) == -signal.SIGKILL
    group.end()


def test_a_worker_ends_with_its_launcher(group):
    process = group.start(NOBODY)
    process.stdin.close()  # what the system does when the launcher is gone
    assert group.wait(process) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "worker"])
def test_nobody_is_left_of_a_build_that_dies_while_it_imports(victim, tmp_path):
    raw = write_class_folders(tmp_path / "raw", ["cat", "dog"], 4, splits=["train"])
    words = ["--source", "folder", "--input", raw, "--output", tmp_path / "out", "--direct_num_workers", 2]
    with Life(words, tmp_path / "log") as life:
        wait_until(life.workers)
        life.kill(victim, random.Random(0))
        code, _, errors = life.wait()
        assert not life.wait_for_orphans()
    assert code == (1 if victim == "worker" else -signal.SIGKILL)
    assert victim == "launcher" or "ShardsetError: a worker process was killed (SIGKILL)" in errors
    assert not (tmp_path / "out" / naming.MANIFEST).exists()
