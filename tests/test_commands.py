"""The two programs as a shell sees them: names, completion, versions."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from shardset.version import __version__

SCRIPTS = Path(sysconfig.get_path("scripts"))
PROGRAMS = {"shardset-pipelines": ["build", "verify", "inspect", "plan"], "shardset-trainer": ["train", "evaluate"]}


def run(words: list[str], text: str | None = None) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, input=text).stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_installed_program_says_its_version(program):
    assert run([str(SCRIPTS / program), "--version"]) == f"shardset {__version__}\n"


@pytest.mark.parametrize("program", PROGRAMS)
def test_bash_completes_the_verbs_and_flags(program):
    script = run([str(SCRIPTS / program), "--print-completion", "bash"])
    ask = f"""{script}
COMP_WORDS=({program} '') COMP_CWORD=1 COMP_LINE='{program} ' COMP_POINT=${{#COMP_LINE}}
"$(complete -p {program} | sed -E 's/.*-F ([^ ]+).*/\\1/')" {program} '' {program}
echo "${{COMPREPLY[@]}}"
"""
    found = run(["bash"], ask).split()
    assert set(PROGRAMS[program]) <= set(found)


@pytest.mark.parametrize(
    ("words", "library"),
    [
        ("pipelines build --source folder --input in --output out", "apache_beam"),
        ("pipelines verify shards", "isal"),
        ("pipelines --help", "shtab"),
        ("trainer train --manifest shards", "torch"),
        ("trainer bench-input --manifest shards", "cv2"),
        ("trainer --version", "shtab"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_the_extra_that_brings_it(words, library, tmp_path):
    program = words.split()[0]
    start = f"import sys; sys.modules[{library!r}] = None; from {program}.__main__ import program; program()"
    done = subprocess.run(
        [sys.executable, "-c", start, *words.split()[1:]], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )  # fmt: skip
    assert done.returncode == 1
    assert f"the library {library} is not installed" in done.stderr
    assert f"pip install 'shardset[{program}]'" in done.stderr
    assert "Traceback" not in done.stderr
