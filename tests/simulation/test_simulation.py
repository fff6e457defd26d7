"""Seeds of each story; the planted bugs, each of which a seed must find; and that a seed is one schedule."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.__main__ import STORIES, check

REPOSITORY = Path(__file__).parent.parent.parent
PLANTED = REPOSITORY / "tests/simulation/planted"
PACKAGES = ("shardset", "pipelines", "trainer")
STORY_OF = {
    "race_of_two_builds": "builds",
    "flips_in_the_plan": "builds",
    "empty_page_of_a_listing": "builds",
    "delete_without_generation": "builds",
    "unfenced_checkpoint": "training",
    "mark_before_its_state": "training",
    "retry_that_writes_twice": "training",
}
AT_ONCE = 25
"""Seeds of one test."""


@pytest.mark.parametrize("first", range(0, 100, AT_ONCE))
@pytest.mark.parametrize("story", STORIES)
def test_a_hundred_schedules_end_as_they_should(story: str, first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        check(story, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 5_000, 100))
@pytest.mark.parametrize("story", STORIES)
def test_thousands_of_schedules_end_as_they_should(story: str, first: int) -> None:
    for seed in range(first, first + 100):
        check(story, seed)


@pytest.mark.parametrize("story", STORIES)
def test_a_seed_is_one_schedule(story: str) -> None:
    first, again = (check(story, 3) for _ in range(2))
    assert (first.num_events, first.now, list(first.events)) == (again.num_events, again.now, list(again.events))


def test_every_patch_is_tried() -> None:
    assert sorted(STORY_OF) == sorted(path.stem for path in PLANTED.glob("*.patch"))


@pytest.mark.nightly
@pytest.mark.parametrize("bug", STORY_OF)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("simulation", "makers"):
        shutil.copytree(REPOSITORY / "tests" / name, tmp_path / "tests" / name)
    subprocess.run(["git", "apply", PLANTED / f"{bug}.patch"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "tests.simulation", STORY_OF[bug], "0:1000"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert found.returncode == 1, found.stderr
    assert f"again: python -m tests.simulation {STORY_OF[bug]}" in found.stdout
