"""What runs on a TPU VM, in real processes: a training that outlives whoever started it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.tpu import worker
from trainer.tpu.commands import FOLDER
from trainer.tpu.worker import WorkerFolder

# Takes the place of the trainer: prints, waits for a file or SIGTERM, ends with the code that its arguments say.
STAND_IN = """\
import signal, sys, time
from pathlib import Path
_, _, place, code = sys.argv
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(3)))
print("step 0", flush=True)
Path(place, "began").touch()
while not Path(place, "go").exists():
    time.sleep(0.02)
print("final", flush=True)
sys.exit(int(code))
"""


class Machine:
    """A home folder, where `python -m trainer train PLACE CODE` is the stand-in."""

    def __init__(self, home: Path) -> None:
        self.home = home
        package = home / "trainer"
        package.mkdir()
        real = Path(worker.__file__).parents[1]
        (package / "__init__.py").write_text(f"__path__.append({str(real)!r})\n")
        (package / "__main__.py").write_text(STAND_IN)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A command, as ssh would start it."""
        return subprocess.Popen(
            [sys.executable, "-m", "trainer.tpu.worker", *words],
            cwd=self.home,
            env=os.environ | {"HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def train(self, code: int = 0) -> subprocess.Popen[str]:
        """`train`; returns when the stand-in has begun and its number stands in the folder, unless it has ended."""
        started = self.start("train", str(self.home), str(code))
        until(lambda: (self.home / "began").exists() and (self.folder.code.exists() or self._pid_is_known()))
        return started

    def _pid_is_known(self) -> bool:
        return self.folder.pid.exists() and bool(self.folder.pid.read_text())

    def go(self) -> None:
        """Lets the stand-in end."""
        (self.home / "go").touch()

    @property
    def folder(self) -> WorkerFolder:
        return WorkerFolder(self.home / FOLDER)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.go()  # what a failed test left ends too


def until(condition: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen within 600 s")


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=600)
    return process.returncode, output, errors


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_training_prints_its_lines_and_ends_with_its_code(machine, code):
    machine.go()
    assert ended(machine.train(code))[:2] == (code, "step 0\nfinal\n")
    lines = machine.folder.log.read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["step 0", "final"]
    assert all(line.startswith("20") for line in lines)


def test_a_training_goes_on_when_the_connection_breaks_and_can_be_joined(machine):
    first = machine.train(1)
    first.kill()
    first.wait()
    assert machine.folder.is_training
    second = machine.start("train", str(machine.home), "1")
    assert second.stdout is not None
    assert second.stdout.readline() == "joining the training that runs here\n"
    machine.go()
    code, output, _ = ended(second)
    assert (code, output) == (1, "final\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_training_does_not_end_with_the_session_that_started_it(machine, number):
    first = machine.train(0)
    os.killpg(first.pid, number)
    first.wait(timeout=600)
    assert machine.folder.is_training
    machine.go()
    until(lambda: not machine.folder.is_training)
    assert machine.folder.code.read_text() == "0"


def test_with_torchtpu_a_worker_starts_a_process_for_each_chip(machine):
    (machine.home / "torch_tpu.py").touch()
    (machine.home / "trainer/tpu").mkdir()
    real = Path(worker.__file__).parent
    (machine.home / "trainer/tpu/__init__.py").write_text(f"__path__.append({str(real)!r})\n")
    launcher = "import sys; print(f'one for each chip: {sys.argv[1:]}'); sys.exit(3)\n"
    (machine.home / "trainer/tpu/processes.py").write_text(launcher)
    expected = f"one for each chip: {[str(machine.home), '3']}\n"
    assert ended(machine.start("train", str(machine.home), "3"))[:2] == (3, expected)


def test_another_training_is_refused_while_one_runs(machine):
    first = machine.train(0)
    code, _, errors = ended(machine.start("train", "--epochs=3"))
    assert code == worker.FAILED
    assert "another training runs here" in errors
    machine.go()
    assert ended(first)[0] == 0


def test_stop_lets_the_trainer_save_and_both_commands_say_so(machine):
    training = machine.train(0)
    code, output, _ = ended(machine.start("stop"))
    assert (code, output) == (0, f"the trainer ended with code {worker.STOPPED}\n")
    assert ended(training)[:2] == (worker.STOPPED, "step 0\nsaved\n")


def test_a_training_that_is_asked_to_stop_by_the_machine_ends_with_3(machine):
    training = machine.train(0)
    os.kill(int(machine.folder.pid.read_text()), signal.SIGTERM)
    assert ended(training)[0] == worker.SAVED


def test_a_training_after_a_stop_is_a_new_one(machine):
    machine.train(0)
    assert ended(machine.start("stop"))[0] == 0
    machine.go()
    assert ended(machine.train(0))[:2] == (0, "step 0\nfinal\n")
    assert len(machine.folder.log.read_text().splitlines()) == 4


def test_stop_where_nothing_trains_is_no_error(machine):
    assert ended(machine.start("stop")) == (0, "nothing is training here\n", "")


def test_a_trainer_that_is_killed_leaves_the_code_of_its_signal(machine):
    training = machine.train(0)
    os.kill(int(machine.folder.pid.read_text()), signal.SIGKILL)
    assert ended(training)[0] == 128 + signal.SIGKILL


def test_a_training_of_which_nobody_knows_the_end_has_failed(tmp_path, capsys):
    assert worker._code(WorkerFolder(tmp_path)) == worker.FAILED
    assert "left no exit code" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["start"], ["stop", "now"]])
def test_other_words_are_a_usage_error(words, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert worker.main(words) == 2
