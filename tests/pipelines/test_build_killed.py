"""A build that is killed at any moment leaves no set or a whole one, and a rerun makes what an
undisturbed build makes.

SHARDSET_KILLS says how many builds are killed (1). tests/simulation has those in a bucket.
"""

import os
import random
import signal
import threading
import time

import pytest

from pipelines.check.verify import verify
from pipelines.plan import paths
from shardset.errors import ManifestError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.storage.open import open_storage
from tests.makers import runners
from tests.makers.folders import write_class_folders
from tests.makers.lives import Life, finish, wait_for_objects
from tests.makers.stored import files_of

NUM_KILLS = int(os.environ.get("SHARDSET_KILLS", "1"))
VICTIMS = ["launcher", "worker", "everything"]
NUM_SHARDS = 20
LAST_BEFORE_SHARDS = 8


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """1,600 pictures, one of which can't be decoded: enough for a build of several seconds."""
    folder = write_class_folders(
        tmp_path_factory.mktemp("killed") / "raw",
        ["cat", "dog", "owl", "fox"],
        200,
        splits=["train", "test"],
    )
    (folder / "train/cat/000.png").write_bytes(b"<html>404</html>")
    return folder


def words_of(raw, output, *more, num_shards=NUM_SHARDS):
    """A build of that input with two workers."""
    return [
        "--source", "folder", "--input", raw, "--output", output, "--num-shards", num_shards,
        "--direct_running_mode=multi_processing", "--direct_num_workers=2", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(raw):
    """The folder of a build that nobody killed."""
    finish(words_of(raw, raw.parent / "undisturbed"), raw.parent / "undisturbed.log")
    return raw.parent / "undisturbed"


def moment(draw, num_left):
    """How many objects to wait for and how many seconds more: a third of all kills fall before the
    first shard.
    """
    if draw.random() < 1 / 3 or num_left <= LAST_BEFORE_SHARDS:
        return min(num_left, draw.randint(1, LAST_BEFORE_SHARDS)), draw.uniform(0.0, 1.0)
    return draw.randint(LAST_BEFORE_SHARDS, num_left - 1), draw.uniform(0.0, 0.05)


def live_and_die(words, output, seed, num_objects, log, verb="build"):
    """Starts a build to that many objects, and kills one of its processes, or all, at a random
    moment.
    """
    draw, victim, before = random.Random(seed), VICTIMS[seed % len(VICTIMS)], num_files(output)
    after, seconds = moment(draw, max(0, num_objects - before))
    with Life(words, log, verb) as life:
        wait_for_objects(life, str(output), before + after)
        threading.Event().wait(seconds)
        killed = life.kill(victim, draw)
        code, _, errors = life.wait()
        assert not life.wait_for_orphans()
    how = f"{victim} killed" if killed else "ended"
    print(
        f"seed {seed}: {how} {seconds:.3f} s after object {before + after} of {num_objects}, code"
        f" {code}"
    )
    if code == 1:
        assert "a worker process was killed (SIGKILL)" in errors


def whole(output):
    """Whether a reader finds a set there; one that it finds is right to the last byte."""
    try:
        manifests.load(str(output))
    except ManifestError:
        return False
    assert verify(str(output), deep=True).problems == ()
    return True


def names_below(url, folder):
    return {found.name for found in open_storage(str(url)).list(folder)}


def num_files(folder):
    return sum(1 for _ in open_storage(str(folder)).list())


def check_a_killed_build(raw, undisturbed, output, seed, log):
    words = words_of(raw, output)
    for life in range(1 + (seed % 4 == 3)):
        live_and_die(words, output, seed + 1000 * life, num_files(undisturbed), log)
        was_whole = whole(output)
    recorded = names_below(output, paths.RECORDS)
    counters = finish(words, log)
    assert was_whole <= (len(recorded) == 2 * NUM_SHARDS)
    assert counters.get("shards_skipped", 0) == len(recorded)
    assert counters.get("shards_written", 0) == 2 * NUM_SHARDS - len(recorded)
    assert files_of(output) == files_of(undisturbed)
    assert names_below(output, naming.PLAN_FOLDER) == names_below(undisturbed, naming.PLAN_FOLDER)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_build_killed_on_disk_is_absent_or_whole_and_a_rerun_completes_it(
    raw, undisturbed, tmp_path, seed
):
    check_a_killed_build(raw, undisturbed, tmp_path / "out", seed, tmp_path / "log")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.startswith(".")]


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [runners.PRISM, runners.SPARK], ids=["prism", "spark"])
def test_a_build_killed_on_another_runner_is_completed_by_a_rerun(
    raw, undisturbed, tmp_path, flags
):
    output, log = tmp_path / "out", tmp_path / "log"
    words = ["--source", "folder", "--input", raw, "--output", output]
    words += ["--num-shards", NUM_SHARDS, *flags]
    with Life(words, log) as life:
        while not names_below(output, paths.RECORDS) and life.process.poll() is None:
            time.sleep(0.005)
        assert life.kill("everything", random.Random(0)), log.read_text()
    recorded = names_below(output, paths.RECORDS)
    assert not whole(output)
    counters = finish(words, log)
    assert counters["shards_skipped"] == len(recorded) > 0
    assert counters["shards_written"] == 2 * NUM_SHARDS - len(recorded)
    assert files_of(output) == files_of(undisturbed)


@pytest.mark.slow
def test_ctrl_c_ends_the_build_with_code_130_and_one_sentence_and_a_rerun_completes_it(
    raw, undisturbed, tmp_path
):
    words = words_of(raw, tmp_path / "out")
    with Life(words, tmp_path / "log") as life:
        wait_for_objects(life, str(tmp_path / "out"), LAST_BEFORE_SHARDS)
        os.killpg(life.process.pid, signal.SIGINT)  # as a terminal does
        code, _, errors = life.wait()
        assert not life.wait_for_orphans()
    assert code == 130
    assert errors.endswith("stopped; the same command continues\n")
    assert "Traceback" not in errors
    finish(words, tmp_path / "log")
    assert files_of(tmp_path / "out") == files_of(undisturbed)
