"""Seeds of each story; the planted bugs, each of which a seed must find; and that a seed is one
schedule.
"""

import shutil
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.simulation.__main__ import STORIES, check

REPOSITORY = Path(__file__).parent.parent.parent
PLANTED = REPOSITORY / "tests/simulation/planted"
PACKAGES = ("shardset", "pipelines", "trainer")
STORY_OF = {
    "race_of_two_builds": "builds",
    "empty_page_of_a_listing": "builds",
    "delete_without_generation": "builds",
    "published_before_the_old_is_stored": "changes",
    "versions_before_their_files": "changes",
    "unfenced_checkpoint": "training",
    "mark_before_its_state": "training",
    "retry_that_writes_twice": "training",
    "theft_of_a_living_lease": "training",
}
AT_ONCE = 25
"""Seeds of one test."""


@pytest.mark.parametrize(
    ("story", "first"),
    [
        ("changes", 0),
        *((story, first) for story in ("builds", "training") for first in range(0, 100, AT_ONCE)),
    ],
)
def test_some_schedules_end_as_they_should(story: str, first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        check(story, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 1_000, 100))
@pytest.mark.parametrize("story", STORIES)
def test_thousands_of_schedules_end_as_they_should(story: str, first: int) -> None:
    for seed in range(first, first + 100):
        check(story, seed)


@pytest.mark.parametrize("seed", [3, 11])
@pytest.mark.parametrize("story", STORIES)
def test_a_seed_is_one_schedule(story: str, seed: int) -> None:
    first, again = (check(story, seed) for _ in range(2))
    differences = (pair for pair in zip_longest(first.events, again.events) if pair[0] != pair[1])
    assert next(differences, None) is None
    assert (first.now, first.random.random()) == (again.now, again.random.random())


def test_every_patch_is_tried() -> None:
    assert sorted(STORY_OF) == sorted(path.stem for path in PLANTED.glob("*.patch"))


@pytest.mark.nightly
@pytest.mark.parametrize("bug", STORY_OF)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(
            REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("simulation", "makers"):
        shutil.copytree(REPOSITORY / "tests" / name, tmp_path / "tests" / name)
    subprocess.run(["git", "apply", PLANTED / f"{bug}.patch"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "tests.simulation", STORY_OF[bug], "0:1000"]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert found.returncode == 1, found.stderr
    assert f"again: python -m tests.simulation {STORY_OF[bug]}" in found.stdout
