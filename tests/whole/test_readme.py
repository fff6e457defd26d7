"""Every command of the README, run as it stands on small inputs of the same shape."""

import re
import sys

import pytest

from shardset.format import manifest as manifests
from tests.makers.documented import (
    REPOSITORY,
    commands_of,
    page,
    python_of,
    run,
    run_all,
    words_of,
    write_inputs,
)

README = page("README.md")
COMMANDS = commands_of("README.md")
# These two are what CI itself runs.
ELSEWHERE = [c for c in COMMANDS if c.startswith("make ")]
OF_TRAINER = [command for command in COMMANDS if "demo/digits" in command]
# Minutes at the size that the README states; here with smaller numbers.
SMALLER = {
    "train=1280000": "train=1280",
    "train=2000,test=1000": "train=20,test=10",
    "train=1252,validation=1000": "train=5,validation=3",
}


@pytest.mark.slow
def test_every_data_command_of_the_readme_works_in_its_order(tmp_path):
    write_inputs(tmp_path)
    assert len(ELSEWHERE) == 2
    of_data = [command for command in COMMANDS if command not in {*ELSEWHERE, *OF_TRAINER}]
    run_all(of_data, tmp_path, SMALLER)
    stream, others = python_of(README)
    assert "3 steps an epoch" in run([sys.executable, "-c", stream], tmp_path)
    assert run([sys.executable, "-c", others], tmp_path).strip()
    assert manifests.load(str(tmp_path / "written")).manifest.split("train").num_samples == 10


@pytest.mark.slow
def test_the_demo_goes_from_digits_to_an_accuracy_and_the_trainers_commands_go_on_from_there(
    tmp_path,
):
    printed = run([sys.executable, "-m", "examples.demo"], tmp_path)
    (accuracy,) = re.findall(r"^test accuracy ([0-9.]+)", printed, flags=re.M)
    assert float(accuracy) > 0.97
    following = printed.splitlines()[-1].partition(" && ")[2]
    assert "digit-0" in run(words_of(following, {}), tmp_path)
    run_all(OF_TRAINER, tmp_path, {})


def test_every_link_of_the_readme_leads_somewhere():
    targets = re.findall(r"\]\(https://github.com/shardset/shardset/blob/main/([^)#]+)", README)
    assert len(targets) > 10
    assert [target for target in targets if not (REPOSITORY / target).exists()] == []
