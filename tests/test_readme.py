"""Every command of the README, run as it stands on small inputs of the same shape."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.makers import imagenet
from tests.makers.cifar import cifar10, python_files, write_archive
from tests.makers.folders import write_class_folders, write_csv

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", README, flags=re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
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
    place = tmp_path_factory.mktemp("readme")
    write_class_folders(place / "photos", ["cat", "dog"], 40)
    rows = [[f"photos/{name}/{number:03d}.png", name] for name in ("cat", "dog") for number in range(40)]
    write_csv(place / "photos.csv", ["path", "label"], rows)
    write_archive(place / "cifar-10-python.tar.gz", python_files(cifar10(rows=20)), folder="cifar-10-batches-py")
    imagenet.put(place / "ilsvrc", imagenet.archives(imagenet.images()))
    return place


def run(words: list[str], place: Path) -> str:
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_every_data_command_of_the_readme_works_in_its_order(workplace):
    ran = 0
    for command in COMMANDS:
        if command in ELSEWHERE or " trainer " in command:
            continue
        for large, small in SMALLER.items():
            command = command.replace(large, small)
        words = shlex.split(command)
        assert words[0] == "python"
        run([sys.executable, *words[1:]], workplace)
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
