"""Runs on every TPU VM: starts a training that outlives the ssh connection, and keeps its log and exit code.

    python -m trainer.tpu.worker train ARGUMENTS    start `python -m trainer train ARGUMENTS`, or join it if it runs
    python -m trainer.tpu.worker stop               ask it to save and exit

The folder ~/shardset-tpu holds `train.lock` (locked while training), `train.json` (the arguments), `train.pid`,
`train.log` (all trainings so far, each line with its time), `train.code` (exit code of the last one) and `train.stop`
(`stop` was called).
"""

import datetime
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from trainer.tpu.commands import FOLDER, LOG
from trainer.tpu.status import SAVED, STOPPED

POLL_S = 0.2
START_S = 30.0
STOP_S = 900.0
LOCK_S = 2.0
"""How long a new training waits for the lock, which a process that only tests it holds for a moment."""

FAILED = 1


class WorkerFolder:
    """The files of one worker."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / LOG
        self.lock, self.arguments, self.pid, self.code, self.stop = (
            folder / f"train.{name}" for name in ("lock", "json", "pid", "code", "stop")
        )

    @contextmanager
    def locked(self, patience_s: float = 0) -> Iterator[bool]:
        """Yields whether this process got the lock. Releases it when the block or the process ends."""
        deadline = time.monotonic() + patience_s
        with self.lock.open("a") as file:
            while not (free := _try_lock(file)) and time.monotonic() < deadline:
                time.sleep(POLL_S / 2)
            yield free

    @property
    def is_training(self) -> bool:
        """Whether a process holds the lock."""
        with self.locked() as free:
            return not free


def main(command: Sequence[str]) -> int:
    """Runs one command. Returns its exit code."""
    folder = WorkerFolder(Path.home() / FOLDER)
    match list(command):
        case ["train", *arguments]:
            return train(folder, arguments)
        case ["supervise", *arguments]:
            return supervise(folder, arguments)
        case ["stop"]:
            return stop(folder)
    print("usage: python -m trainer.tpu.worker train ARGUMENTS | stop", file=sys.stderr)
    return 2


def train(folder: WorkerFolder, arguments: Sequence[str]) -> int:
    """Starts a training, or joins the one that runs. Prints its log until it ends, and returns its exit code."""
    start = folder.log.stat().st_size if folder.log.exists() else 0
    if folder.is_training:
        running = json.loads(folder.arguments.read_text())
        if running != list(arguments):
            print(f"another training runs here: {' '.join(running)}; stop it first", file=sys.stderr)
            return FAILED
        print("joining the training that runs here", flush=True)
    else:
        _start(folder, arguments)
    _follow(folder, start)
    return _code(folder)


def supervise(folder: WorkerFolder, arguments: Sequence[str]) -> int:
    """Trains, and records the log and the exit code. Runs in its own session, apart from the ssh connection."""
    # A machine that shuts down sends SIGTERM to all processes. The trainer saves, and this one must wait for it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with folder.locked(patience_s=LOCK_S) as free:
        if not free:
            return FAILED
        folder.arguments.write_text(json.dumps(list(arguments)))
        command = [sys.executable, "-m", *_program(), *arguments]
        with folder.log.open("a") as log, subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        ) as process:  # fmt: skip
            folder.pid.write_text(str(process.pid))
            assert process.stdout is not None
            for line in process.stdout:
                log.write(f"{datetime.datetime.now(datetime.UTC).isoformat()} {line.rstrip()}\n")
                log.flush()
        code = process.returncode
        folder.code.write_text(str(code if code >= 0 else 128 - code))
        folder.pid.unlink()
    return code


def stop(folder: WorkerFolder) -> int:
    """Sends SIGTERM to the trainer, and waits until it has saved and ended."""
    if not folder.is_training:
        print("nothing is training here", flush=True)
        return 0
    folder.stop.touch()
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended by itself
        os.kill(int(folder.pid.read_text()), signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while folder.is_training:
        if time.monotonic() > deadline:
            print(f"still training {STOP_S:.0f} s after SIGTERM; see {folder.log}", file=sys.stderr)
            return FAILED
        time.sleep(POLL_S)
    print(f"the trainer ended with code {_code(folder)}", flush=True)
    return 0


def _program() -> list[str]:
    """The module that trains here: with TorchTPU it starts a process for each chip, torch_xla needs only one."""
    return ["trainer.tpu.processes"] if importlib.util.find_spec("torch_tpu") else ["trainer", "train"]


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(folder: WorkerFolder, arguments: Sequence[str]) -> None:
    for path in (folder.code, folder.stop, folder.pid):
        path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "trainer.tpu.worker", "supervise", *arguments]
    quiet = subprocess.DEVNULL
    # In its own session, which does not end with the ssh connection.
    supervisor = subprocess.Popen(words, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)
    deadline = time.monotonic() + START_S
    while not folder.pid.exists() and not folder.code.exists() and supervisor.poll() is None:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)


def _follow(folder: WorkerFolder, start: int) -> None:
    """Prints the log from byte `start`, without the times, until the training has ended."""
    folder.log.touch()
    with folder.log.open(errors="replace") as log:
        log.seek(start)
        running = True
        while running:
            # Asked before reading, so that the last read comes after the end of the training.
            running = folder.is_training
            for line in log:
                print(line.partition(" ")[2], end="", flush=True)
            time.sleep(POLL_S if running else 0)


def _code(folder: WorkerFolder) -> int:
    if not folder.code.exists():
        print("the training was killed: it left no exit code; was the machine rebooted?", file=sys.stderr)
        return FAILED
    code = int(folder.code.read_text())
    # 143: SIGTERM came before the trainer handles it. It had nothing to save yet.
    return STOPPED if code in (SAVED, 128 + signal.SIGTERM) and folder.stop.exists() else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
