"""The two programs as a shell sees them: names, versions."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import parsers as pipelines
from shardset.version import __version__
from tests.makers.documented import REPOSITORY, SCRIPTS, run, start
from trainer import cli as trainer

PROGRAMS = ["shardset-pipelines", "shardset-trainer"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_installed_program_says_its_version(program):
    assert run([str(SCRIPTS / program), "--version"], REPOSITORY) == f"shardset {__version__}\n"


def parsers_of(parser):
    yield parser
    for action in parser._actions:
        for verb in (
            action.choices.values() if isinstance(action, argparse._SubParsersAction) else ()
        ):
            yield from parsers_of(verb)


@pytest.mark.parametrize(
    "program", [pipelines.parser, trainer.parser], ids=["pipelines", "trainer"]
)
def test_every_verb_and_every_flag_has_a_line_of_help(program):
    verbs = list(parsers_of(program()))
    assert len(verbs) > 6
    for verb in verbs:
        assert not [
            action.dest
            for action in verb._actions
            if not action.help and action.nargs != argparse.PARSER
        ]
        assert verb.description or verb.prog.endswith(" tpu")


@pytest.mark.parametrize(
    ("program", "redirected", "shown"),
    [("pipelines", "", "shards \\u2192 tars\n"), ("trainer", ">&-", "")],
)
def test_what_standard_output_can_not_take_does_not_end_a_program(program, redirected, shown):
    code = (
        f"import {program}.cli as it; it.main = lambda: print('shards → tars') or 0; it.program()"
    )
    words = ["sh", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, code]
    done = start(words, REPOSITORY, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")


def make_env(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """`make env` beside a half-made environment, with a Python that only writes down how it is
    called.
    """
    for name, text in {"python": python, ".venv/bin/python": "exit 1"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    for name in ("Makefile", "setup.py", "shardset/version.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    return subprocess.run(
        ["make", "env", "PYTHON=./python"], capture_output=True, text=True, cwd=folder
    )


def test_an_environment_that_was_half_made_is_made_whole(tmp_path):
    works = "printf '#!/bin/sh\\n' > .venv/bin/python"
    done = make_env(tmp_path, f'echo "$@" >> calls; if [ "$2" = venv ]; then {works}; fi')
    assert done.returncode == 0, done.stderr
    assert "-m venv .venv" in (tmp_path / "calls").read_text()


def test_a_python_that_is_too_old_is_named_before_an_environment_is_made_of_it(tmp_path):
    old = "import sys; sys.version_info, sys.version = (3, 10, 12), '3.10.12'"
    done = make_env(tmp_path, f'[ "$1" = -c ] && exec {sys.executable} -c "{old}; $2"; touch made')
    assert done.returncode != 0
    assert (
        "is Python 3.10.12, expected 3.11 or newer; name one: make PYTHON=python3.11" in done.stderr
    )
    assert not (tmp_path / "made").exists()
