"""The commands of a Markdown page, and the small inputs that they are run on."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.makers import imagenet
from tests.makers.cifar import cifar10, python_files, write_archive
from tests.makers.folders import write_class_folders, write_csv

REPOSITORY = Path(__file__).parent.parent.parent
SCRIPTS = Path(sys.executable).parent


def page(name: str, *, stop: str | None = None) -> str:
    """The text of a page of the repository, perhaps up to some words."""
    return (REPOSITORY / name).read_text().partition(stop or "\0")[0]


def lists_of_project() -> dict[str, list[str]]:
    """The distributions that pyproject.toml names for the base and for each extra."""
    project = tomllib.loads(page("pyproject.toml"))["project"]
    lists = {"base": project["dependencies"]}
    for extra, specs in project["optional-dependencies"].items():
        lists[extra] = [
            one for spec in specs for one in lists.get(spec[len("shardset[") : -1], [spec])
        ]
    return lists


def steps_of(text: str) -> list[tuple[str, str]]:
    """The blocks of a text that can be run, in their order: ("console" or "python", their text)."""
    return re.findall(r"```(console|python)\n(.*?)```", text, flags=re.S)


def commands_of(name: str) -> list[str]:
    """The lines of all console blocks of a page of the repository."""
    steps = steps_of(page(name))
    return [line for kind, text in steps if kind == "console" for line in text.splitlines()]


def python_of(text: str) -> list[str]:
    """All Python blocks of a text."""
    return [code for kind, code in steps_of(text) if kind == "python"]


def shown(start: str) -> list[str]:
    """The commands of the README and of all pages that begin with these words."""
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    lines = (line for page in pages for line in commands_of(str(page.relative_to(REPOSITORY))))
    return [*dict.fromkeys(line for line in lines if line.startswith(start))]


def write_inputs(place: Path) -> Path:
    """The inputs that the pages name: photos/, photos.csv, an archive of CIFAR-10, and ilsvrc/."""
    write_class_folders(place / "photos", ["cat", "dog"], 40)
    rows = [
        [f"photos/{name}/{number:03d}.png", name] for name in ("cat", "dog") for number in range(40)
    ]
    write_csv(place / "photos.csv", ["path", "label"], rows)
    write_archive(
        place / "cifar-10-python.tar.gz",
        python_files(cifar10(rows=20)),
        folder="cifar-10-batches-py",
    )
    imagenet.put(place / "ilsvrc", imagenet.archives(imagenet.images()))
    return place


def words_of(command: str, replaced: Mapping[str, str]) -> list[str]:
    """The words to start, with smaller numbers in them and this environment's programs."""
    for large, small in replaced.items():
        command = command.replace(large, small)
    program, *rest = shlex.split(command)
    return [str(SCRIPTS / program) if program != "make" else program, *rest]


def run_all(commands: Iterable[str], place: Path, replaced: Mapping[str, str]) -> list[str]:
    """What each command prints."""
    return [run(words_of(command, replaced), place) for command in commands]


def start(words: list[str], place: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended; its Python imports from this repository."""
    path = f"{SCRIPTS}:{os.environ['PATH']}"
    # Two threads each are enough where several tests run at once.
    own = {"PATH": path, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(REPOSITORY)}
    environment = {**os.environ, **own, **variables}
    return subprocess.run(
        words, cwd=place, capture_output=True, text=True, timeout=600, env=environment
    )


def run(words: list[str], place: Path, **variables: str) -> str:
    """What a command prints; fails with its last lines if it fails."""
    done = start(words, place, **variables)
    assert done.returncode == 0, (
        f"{shlex.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout
