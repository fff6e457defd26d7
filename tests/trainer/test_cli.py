import os
import re
import signal
import subprocess
import sys
import time

import pytest

from shardset.program import FAILED, INTERRUPTED, OK, PREEMPTED, USAGE
from shardset.storage.open import open_storage
from shardset.version import __version__
from tests.makers.shardset import new_set, png_samples
from tests.makers.training import losses, tiny_flags
from trainer import cli as command
from trainer.recipes import RECIPES
from trainer.run_folder import names


def test_a_run_by_command_line(manifest, tmp_path, capsys):
    assert (
        command.main(["train", *tiny_flags(manifest, tmp_path), "--epochs", "1", "--seed", "3"])
        == OK
    )
    printed = capsys.readouterr().out
    assert re.search(
        r"^epoch 1/1: loss .*; val: loss [0-9.]+, accuracy [0-9.]+$", printed, flags=re.M
    )
    assert printed.splitlines()[-2].startswith("val accuracy")
    assert "step device" not in printed
    assert len(losses(tmp_path)) == 7
    assert command.main(["evaluate", "--run-dir", str(tmp_path)]) == OK
    assert re.match(r"step 7: val accuracy .* 21 samples", capsys.readouterr().out)
    assert command.main(["merge-logs", "--run-dir", str(tmp_path)]) == OK
    assert "host-000 step device=cpu epoch=1 step=0" in capsys.readouterr().out


def test_an_evaluation_needs_neither_a_split_to_train_on_nor_to_write_in_the_run_folder(
    manifest, tmp_path, capsys
):
    run, other = tmp_path / "run", new_set({"test": png_samples("test", 12, size=8)})
    assert command.main(["train", *tiny_flags(manifest, run), "--epochs", "1"]) == OK
    (run / "worst.json").mkdir()  # a file can't take its place
    capsys.readouterr()
    assert command.main(["evaluate", "--run-dir", str(run), "--manifest", other]) == OK
    shown = capsys.readouterr().out
    assert re.search(r"^step 7: test accuracy .* 12 samples", shown)
    note = r"^note: the samples of highest loss are not kept \(.*worst\.json: .*\)$"
    assert re.search(note, shown, flags=re.M)


def test_bench_input_counts_real_samples(manifest, tmp_path, capsys):
    assert command.main(["bench-input", *tiny_flags(manifest, tmp_path)]) == OK
    assert capsys.readouterr().out.startswith("52 samples in 7 steps")


@pytest.mark.parametrize("verb", ["train", "bench-input"])
def test_a_budget_that_is_too_small_is_refused_with_one_that_is_enough(
    verb, manifest, tmp_path, capsys
):
    words = [verb, *tiny_flags(manifest, tmp_path), "--set", "budget_bytes=1000"]
    assert command.main(words) in (FAILED, USAGE)
    assert "raise budget_bytes to 1048576 (1 MiB: --set" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "--set", "epoch=3"], USAGE, "did you mean 'epochs'"),
        (["train", "--recipe", "imagenet_resnet5"], USAGE, "did you mean 'imagenet_resnet50'"),
        (["train"], USAGE, "--manifest"),
        (["train", "--manifest", "memory://nothing/here"], USAGE, "no manifest there"),
        (["train", "--strategy", "ddp", "--fake-data"], USAGE, "torchrun"),
        (["merge-logs", "--run-dir", "/no/such/folder"], USAGE, "no logs/host-000.log"),
        (
            ["merge-logs", "--run-dir", "memory://no-run"],
            USAGE,
            "memory://no-run: no logs/host-000.log there",
        ),
        (
            ["evaluate", "--run-dir", "memory://no-run"],
            USAGE,
            "memory://no-run: no config.json there",
        ),
    ],
)
def test_errors_are_one_line_and_have_their_exit_code(
    arguments,
    code,
    message,
    tmp_path,
    capsys,
):
    if "--strategy" not in arguments and arguments[0] == "train":
        arguments = [*arguments, "--strategy", "single", "--run-dir", str(tmp_path)]
    assert command.main(arguments) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def interrupted(words, has_begun):
    """Exit code and stderr of a command that gets a Ctrl-C once it has begun."""
    program = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        while program.poll() is None and not has_begun():
            time.sleep(0.05)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        _, errors = program.communicate(timeout=600)
    finally:
        program.kill()
    return program.returncode, errors


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", pytest.param("replica", marks=pytest.mark.nightly)])
def test_ctrl_c_ends_a_training_with_code_130_and_one_sentence_and_the_same_command_resumes(
    strategy, manifest, tmp_path
):
    words = ["train", *tiny_flags(manifest, tmp_path), "--epochs", "1000"]
    code, errors = interrupted(
        [*words, "--strategy", strategy],
        lambda: bool(names.steps(open_storage(str(tmp_path)))),
    )
    assert code == INTERRUPTED
    assert errors.endswith("stopped; the same command continues\n")
    assert "Traceback" not in errors
    saved = names.steps(open_storage(str(tmp_path)))[-1]
    assert command.main([*words, "--max-steps", str(saved + 1)]) == OK
    assert len(losses(tmp_path)) > saved


SIGNAL = """
import os, signal, sys

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == {library!r} and sys.argv[1:2] == ["train"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Sender())
"""
"""Sends a signal to the trainer when it imports a library: first, to start, to build the model."""


@pytest.mark.slow
@pytest.mark.parametrize("library", ["trainer.cli", "torch", "timm"])
@pytest.mark.parametrize(
    ("signal_name", "code", "said"),
    [("SIGINT", INTERRUPTED, "stopped"), ("SIGTERM", PREEMPTED, "asked to stop")],
)
def test_a_signal_before_the_first_step_ends_as_one_after_it(
    library, signal_name, code, said, manifest, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(SIGNAL.format(library=library, signal=signal_name))
    words = ["-m", "trainer", "train", *tiny_flags(manifest, tmp_path / "run"), "--max-steps", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    run = [sys.executable, *words]
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith(said)
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(Exception, match="--manifest"):
        command.main(["train", "--strategy", "single", "--debug", "--run-dir", str(tmp_path)])


def test_the_old_bfloat16_switch_is_refused_with_what_replaces_it(capsys, monkeypatch):
    monkeypatch.setenv("XLA_USE_BF16", "1")
    assert command.main(["train", "--fake-data"]) == USAGE
    assert "--precision bf16" in capsys.readouterr().err


def test_help_says_what_there_is_without_torch_and_the_version_is_told(
    capsys,
):
    words = [sys.executable, "-X", "importtime", "-m", "trainer", "train", "--help"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert all(name in done.stdout for name in [*RECIPES, "exit codes"])
    assert not re.search(r"\| +torch(_xla)?$", done.stderr, flags=re.M)
    with pytest.raises(SystemExit):
        command.main(["--version"])
    assert __version__ in capsys.readouterr().out


def test_evaluate_has_the_flags_that_mean_something_to_it(
    capsys,
):
    with pytest.raises(SystemExit):
        command.main(["evaluate", "--help"])
    shown = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {"--run-dir", "--resume", "--precision", "--set"} <= shown
    assert not {"--epochs", "--lr", "--seed", "--freeze", "--show-steps", "--profile-steps"} & shown


def test_a_closed_pipe_ends_a_command_without_a_word(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/host-000.log").write_text("2026-11-21T10:00:00+00:00 a line\n" * 10_000)
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "trainer", "merge-logs", "--run-dir", str(tmp_path)]
    with os.fdopen(writing) as closed:
        done = subprocess.run(words, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (FAILED, "")
