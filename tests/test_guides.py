"""Every command and line of code on the pages for beginners and for those who come from elsewhere, run as it stands."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.environment import peers_python
from scripts import venvs
from tests.makers.documented import REPOSITORY, commands_of, run, words_of, write_inputs
from tests.makers.folders import write_class_folders

SHORTER = {"--manifest shards --run-dir run": "--manifest shards --run-dir run --strategy single --max-steps 10"}
WRITE_MDS = """
from pathlib import Path
from streaming import MDSWriter
with MDSWriter(out="mds/train", columns={"image": "bytes", "label": "int"}) as writer:
    for path in sorted(Path("photos").glob("*/*.png")):
        writer.write({"image": path.read_bytes(), "label": int(path.parent.name == "dog")})
"""
MADE_UP_TFDS = "import tensorflow_datasets\ntensorflow_datasets.testing.mock_data(num_examples=40).__enter__()\n"
SECTIONS = ["webdataset", "MosaicML Streaming", "ImageFolder", "TFDS"]


def steps_of(text: str) -> list[tuple[str, str]]:
    """The blocks of a page that can be run, in their order: ("console" or "python", their text)."""
    return re.findall(r"```(console|python)\n(.*?)```", text, flags=re.S)


def section_of(title: str) -> str:
    """One section of the page about migrating."""
    return (REPOSITORY / "docs/migrate.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def python_for(code: str, place: Path) -> list[str]:
    """The words that run these lines, in the environment of the library that they come from."""
    if "from streaming import" in code:
        return [peers_python(), "-c", code]
    if "tensorflow_datasets" in code:
        python = venvs.install(venvs.PEERS, venvs.REQUIREMENTS, on_top=True)
        return [str(python), "-c", MADE_UP_TFDS + code]
    return [sys.executable, "-c", code]


@pytest.mark.slow
def test_every_command_of_the_first_hour_works_in_its_order(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    printed = [run(words_of(command, SHORTER), tmp_path) for command in commands_of("docs/start.md")]
    assert any("photos/cat/000.png: " in text for text in printed)
    (loop,) = [text for kind, text in steps_of((REPOSITORY / "docs/start.md").read_text()) if kind == "python"]
    assert "steps an epoch" in run([sys.executable, "-c", loop], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_each_way_of_migrating_works_in_its_order(title: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_class_folders(tmp_path / "pictures", ["cat", "dog"], 12, splits=("train", "val"))
    if title == "webdataset":
        build = "python -m pipelines build --source folder --input photos --output other --num-shards 2"
        run(words_of(build, {}), tmp_path)
        shutil.copytree(tmp_path / "other/train", tmp_path / "tars", ignore=shutil.ignore_patterns("*.npy"))
    if title == "MosaicML Streaming":
        run([peers_python(), "-c", WRITE_MDS], tmp_path)
    steps = steps_of(section_of(title))
    assert [kind for kind, _ in steps].count("python") >= 2
    for kind, text in steps:
        if kind == "console":
            for command in text.splitlines():
                run(words_of(command, {}), tmp_path)
        else:
            run(python_for(text, tmp_path), tmp_path)


def test_the_page_about_migrating_has_no_section_that_is_not_run() -> None:
    text = (REPOSITORY / "docs/migrate.md").read_text()
    assert re.findall(r"^## (.*)$", text, flags=re.M) == SECTIONS
    assert not steps_of(text.split("\n## ")[0])
