"""Every command of the README, run as it stands on small inputs of the same shape."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.makers.documented import REPOSITORY, commands_of, run, words_of, write_inputs

README = (REPOSITORY / "README.md").read_text()
COMMANDS = commands_of("README.md")
# These two are what CI itself runs, and need a cloud project.
ELSEWHERE = [c for c in COMMANDS if c.startswith("make ") or "DataflowRunner" in c]
# Minutes at the size that the README states; here with smaller numbers.
SMALLER = {
    "train=1280000": "train=1280",
    "train=2000,test=1000": "train=20,test=10",
    "train=1252,validation=1000": "train=5,validation=3",
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs that the README names."""
    return write_inputs(tmp_path_factory.mktemp("readme"))


@pytest.mark.slow
def test_every_data_command_of_the_readme_works_in_its_order(workplace):
    ran = 0
    for command in COMMANDS:
        if command in ELSEWHERE or " trainer " in command:
            continue
        run(words_of(command, SMALLER), workplace)
        ran += 1
    assert ran == 9
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert run([sys.executable, "-c", snippet], workplace).strip()


@pytest.mark.slow
def test_the_demo_goes_from_digits_to_an_accuracy(tmp_path):
    words = [sys.executable, "-m", "examples.demo", "--folder", str(tmp_path / "demo")]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (accuracy,) = re.findall(r"^final accuracy=([0-9.]+)", done.stdout, flags=re.M)
    assert float(accuracy) > 0.95


def test_what_is_not_run_here_is_only_what_ci_runs_or_needs_a_cloud():
    assert len(ELSEWHERE) == 3
    assert sum(" trainer " in command for command in COMMANDS) == 1


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (REPOSITORY / target).exists(), target
