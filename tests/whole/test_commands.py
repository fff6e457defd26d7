"""The two programs as a shell sees them: names, versions."""

import argparse
import os
import shutil
import subprocess
import sys

import pytest

from pipelines import parsers as pipelines
from shardset.settings import settings_of
from shardset.verbs import HELP, OF_BOTH, program_of
from shardset.version import __version__
from tests.makers.documented import REPOSITORY, SCRIPTS, run, start
from trainer import cli as trainer
from trainer.config import TrainConfig

SHARDSET = str(SCRIPTS / "shardset")


def test_one_command_lists_every_verb_and_says_its_version():
    assert run([SHARDSET, "--version"], REPOSITORY) == f"shardset {__version__}\n"
    listed = {
        line.split()[0] for line in run([SHARDSET], REPOSITORY).splitlines() if line[:2] == "  "
    }
    verbs = {
        name
        for parser in (pipelines.parser(), trainer.parser())
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name in action.choices
    }
    assert listed - {"shardset"} == verbs == HELP.keys()


def test_the_help_of_training_is_short_and_its_settings_are_asked_for():
    assert len(run([SHARDSET, "train", "--help"], REPOSITORY, COLUMNS="80").splitlines()) <= 70
    listed = run([SHARDSET, "train", "--help-settings"], REPOSITORY)
    assert all(f"  {key} = " in listed for key in settings_of(TrainConfig))


def test_a_verb_of_neither_program_is_refused():
    done = start([SHARDSET, "biuld", "--json"], REPOSITORY)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "shardset: no verb 'biuld', did you mean 'build'?; see `shardset --help`\n"
    )


def test_a_verb_of_both_programs_is_of_the_one_whose_folder_is_given(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    assert program_of("report", ["run"]) == "pipelines"
    for verb in OF_BOTH:
        assert program_of(verb, ["--output", "x", str(tmp_path / "run")]) == "trainer"
        assert program_of(verb, [str(tmp_path), "--to", "hf"]) == "pipelines"
    done = start([SHARDSET, "report", "ftp://host/set"], REPOSITORY)
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: ftp://host/set: storage 'ftp' is not known")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("build --source folder --input x --output y --direct_num_workers=2", "starting Apache"),
        ("evaluate --run-dir nowhere", "loading torch"),
        ("build --source folder --input x --output y --num-shards 1 --samples-per-shard 2", "Con"),
    ],
)
def test_a_terminal_is_told_first_what_takes_seconds(tmp_path, words, first):
    ours, theirs = os.openpty()
    subprocess.run([SHARDSET, *words.split()], cwd=tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 1000).decode().startswith(first)


@pytest.mark.parametrize("verb", ["verify", "merge-logs"])
def test_folders_with_the_names_of_the_programs_do_not_disturb(tmp_path, verb):
    for name in ("trainer", "pipelines", "shardset"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('not this one')")
    assert run([SHARDSET, verb, "--help"], tmp_path).startswith(f"usage: shardset {verb} ")


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


def test_a_python_that_is_too_old_is_named_before_an_environment_is_made_of_it(tmp_path):
    old = "import sys; sys.version_info, sys.version = (3, 10, 12), '3.10.12'"
    python = f'[ "$1" = -c ] && exec {sys.executable} -c "{old}; $2"; touch made'
    (tmp_path / "python").write_text(f"#!/bin/sh\n{python}\n")
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "shardset").mkdir()
    for name in ("Makefile", "pyproject.toml", "shardset/version.py"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    words = ["make", "env", "PYTHON=./python"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert (
        "is Python 3.10.12, expected 3.11 or newer; name one: make PYTHON=python3.11" in done.stderr
    )
    assert not (tmp_path / "made").exists()
