"""Every command of the README, run as it stands on small inputs of the same shape."""

import re
import sys
from pathlib import Path

import pytest

from shardset.format import manifest as manifests
from tests.makers.documented import REPOSITORY, commands_of, run, words_of, write_inputs

README = (REPOSITORY / "README.md").read_text()
# those: test_buckets.py
COMMANDS = [command for command in commands_of("README.md") if "s3://" not in command]
# These two are what CI itself runs, and need a cloud project.
ELSEWHERE = [c for c in COMMANDS if c.startswith("make ") or "DataflowRunner" in c]
OF_TRAINER = [command for command in COMMANDS if " trainer " in command]
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
    assert ran == len(COMMANDS) - len(ELSEWHERE) - len(OF_TRAINER)
    writer, stream, reader = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    run([sys.executable, "-c", writer], workplace)
    assert manifests.load(str(workplace / "written")).manifest.split("train").num_samples == 10
    assert "3 steps an epoch" in run([sys.executable, "-c", stream], workplace)
    assert run([sys.executable, "-c", reader], workplace).strip()


@pytest.mark.slow
def test_the_demo_goes_from_digits_to_an_accuracy_and_the_trainers_commands_go_on_from_there(
    tmp_path,
):
    printed = run([sys.executable, "-m", "examples.demo"], tmp_path)
    (accuracy,) = re.findall(r"^test accuracy ([0-9.]+)", printed, flags=re.M)
    assert float(accuracy) > 0.97
    following = printed.splitlines()[-1].partition(" && python ")[2]
    assert "digit-0" in run([sys.executable, *following.split()], tmp_path)
    for command in OF_TRAINER:
        if " tpu " not in command:
            run(words_of(command, {}), tmp_path)


def test_what_is_not_run_here_is_only_what_ci_runs_or_needs_a_cloud():
    assert len(ELSEWHERE) == 3


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (REPOSITORY / target).exists(), target
