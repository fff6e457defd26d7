"""The server that forks the workers of a build, and the workers that are servers of their own where it can't fork."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from pipelines.build import build
from pipelines.config import BuildConfig
from pipelines.runners.forkserver import CAN_FORK, ForkServer
from shardset.format import naming
from tests.makers.folders import write_class_folders
from tests.makers.lives import Life
from tests.makers.stored import files_of

TWO = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
NOBODY = {"CONTROL_API_SERVICE_DESCRIPTOR": 'url: "localhost:1"'}
"""Beam's worker tries for minutes to reach that."""


def children_of(pid):
    """The process ids of a process's living children that are servers or workers."""
    found = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [child for child in found if parent_of(child) == pid and b"pipelines.runners.local" in command_of(child)]


def command_of(pid):
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def parent_of(pid):
    """The parent of a process; None if it is gone or waits to be noticed."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)


def wait_until(condition):
    """Waits for something that takes at most the import of Beam."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("forks", [True, False])
def test_a_worker_that_fails_is_told_by_its_code(forks):
    with ForkServer(forks=forks) as server:
        server.start("a", {})  # Beam's worker misses the address to call
        server.start("b", {})
        assert (server.wait("a"), server.wait("b")) == (1, 1)
        assert server.first_failure(0) == 1


@pytest.mark.parametrize("forks", [True, False])
def test_what_stands_in_the_folder_of_the_command_is_not_imported_for_a_library(forks, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with ForkServer(forks=forks) as server:
        server.start("a", {})
        assert server.wait("a") == 1  # of the address that is missing, after all imports


def test_nobody_has_failed_while_nobody_is_asked_for():
    with ForkServer() as server:
        assert server.first_failure(0) is None


def test_a_worker_that_is_killed_is_told_by_its_signal_and_the_others_live_on():
    with ForkServer() as server:
        (pid,) = children_of(os.getpid())
        server.start("a", NOBODY)
        wait_until(lambda: len(children_of(pid)) == 1)
        (first,) = children_of(pid)
        server.start("b", NOBODY)
        wait_until(lambda: len(children_of(pid)) == 2)
        os.kill(first, signal.SIGKILL)
        assert server.wait("a") == server.first_failure(0) == -signal.SIGKILL
        (second,) = children_of(pid)
    assert server.wait("b") == -signal.SIGKILL
    wait_until(lambda: parent_of(second) is None)


def test_workers_end_with_a_server_that_is_killed():
    with ForkServer() as server:
        (pid,) = children_of(os.getpid())
        server.start("a", NOBODY)
        wait_until(lambda: len(children_of(pid)) == 1)
        (worker,) = children_of(pid)
        os.kill(pid, signal.SIGKILL)
        assert server.wait("a") == -signal.SIGKILL
        wait_until(lambda: parent_of(worker) is None)
        server.start("b", NOBODY)
        assert server.wait("b") == -signal.SIGKILL


def test_a_server_is_closed_at_once_also_while_it_imports_and_twice():
    server = ForkServer()
    server.start("a", {})
    server.close()
    assert server.wait("a") == -signal.SIGKILL
    server.close()


@pytest.mark.parametrize("forks", sorted({CAN_FORK, False}))
def test_workers_however_they_are_started_write_the_same_bytes(forks, tmp_path):
    raw = write_class_folders(tmp_path / "raw", ["cat", "dog"], 20, splits=["train"])
    config = BuildConfig(source="folder", input=str(raw), output=str(tmp_path / "found"), num_shards={"": 4})
    build(config, TWO, server=ForkServer(forks=forks))
    expected = BuildConfig(source="folder", input=str(raw), output=str(tmp_path / "expected"), num_shards={"": 4})
    build(expected, ["--direct_running_mode=in_memory"])
    assert files_of(tmp_path / "found") == files_of(tmp_path / "expected")


@pytest.mark.parametrize("victim", ["launcher", "worker"])
def test_nobody_is_left_of_a_build_that_dies_while_it_imports(victim, tmp_path):
    raw = write_class_folders(tmp_path / "raw", ["cat", "dog"], 4, splits=["train"])
    with Life(["--source", "folder", "--input", raw, "--output", tmp_path / "out"], tmp_path / "log") as life:
        wait_until(life.workers)  # the server: there is no worker yet
        life.kill(victim, random.Random(0))
        code, _, errors = life.wait()
        assert not life.wait_for_orphans()
    assert code == (1 if victim == "worker" else -signal.SIGKILL)
    assert victim == "launcher" or "ShardsetError: a worker process was killed (SIGKILL)" in errors
    assert not (tmp_path / "out" / naming.MANIFEST).exists()
