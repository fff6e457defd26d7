"""Runs on each TPU VM: a training that outlives the connection it was started by, its log, and its end.

    python -m trainer.tpu.worker train ARGUMENTS    start `python -m trainer train ARGUMENTS`, or join it if it runs
    python -m trainer.tpu.worker stop               ask it to save and end

The folder ~/shardset-tpu holds `train.lock` (locked while training), `train.json` (its arguments), `train.pid`,
`train.log` (all trainings so far, each line with its time), `train.code` (how the last one ended) and `train.stop`
(somebody asked it to stop).
"""

import datetime
import fcntl
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
LOCK_S = 2.0  # those who only look hold the lock for a moment
FAILED = 1


class Place:
    """The files of one worker."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / LOG
        self.lock, self.arguments, self.pid, self.code, self.stop = (
            folder / f"train.{name}" for name in ("lock", "json", "pid", "code", "stop")
        )

    @contextmanager
    def locked(self, patience_s: float = 0) -> Iterator[bool]:
        """Whether this process got the lock; it is kept until the block ends, or with the process."""
        deadline = time.monotonic() + patience_s
        with self.lock.open("a") as file:
            while not (free := _try_lock(file)) and time.monotonic() < deadline:
                time.sleep(POLL_S / 2)
            yield free

    @property
    def is_training(self) -> bool:
        """Whether somebody holds the lock."""
        with self.locked() as free:
            return not free


def main(words: Sequence[str]) -> int:
    """Runs one command; returns its exit code."""
    place = Place(Path.home() / FOLDER)
    match list(words):
        case ["train", *arguments]:
            return train(place, arguments)
        case ["supervise", *arguments]:
            return supervise(place, arguments)
        case ["stop"]:
            return stop(place)
    print("usage: python -m trainer.tpu.worker train ARGUMENTS | stop", file=sys.stderr)
    return 2


def train(place: Place, arguments: Sequence[str]) -> int:
    """Starts a training, or joins the one that runs, and prints its log until it ends; returns its exit code."""
    begin = _size(place.log)
    if place.is_training:
        running = json.loads(place.arguments.read_text())
        if running != list(arguments):
            print(f"another training runs here: {' '.join(running)}; stop it first", file=sys.stderr)
            return FAILED
        print("joining the training that runs here", flush=True)
    else:
        _start(place, arguments)
    _follow(place, begin)
    return _code(place)


def supervise(place: Place, arguments: Sequence[str]) -> int:
    """Trains, and keeps the log and the exit code; runs in a session of its own."""
    # On a machine that is going down everybody gets SIGTERM: the trainer is to save, this process to see it through.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with place.locked(patience_s=LOCK_S) as free:
        if not free:
            return FAILED
        place.arguments.write_text(json.dumps(list(arguments)))
        command = [sys.executable, "-m", "trainer", "train", *arguments]
        with place.log.open("a") as log, subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        ) as process:  # fmt: skip
            place.pid.write_text(str(process.pid))
            assert process.stdout is not None
            for line in process.stdout:
                log.write(f"{_now()} {line.rstrip()}\n")
                log.flush()
        code = process.returncode
        place.code.write_text(str(code if code >= 0 else 128 - code))
        place.pid.unlink()
    return code


def stop(place: Place) -> int:
    """Sends SIGTERM to the trainer and waits until it has saved and ended."""
    if not place.is_training:
        print("nothing is training here", flush=True)
        return 0
    place.stop.touch()
    with suppress(FileNotFoundError, ProcessLookupError):  # it ended by itself meanwhile
        os.kill(int(place.pid.read_text()), signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while place.is_training:
        if time.monotonic() > deadline:
            print(f"still training {STOP_S:.0f} s after SIGTERM; see {place.log}", file=sys.stderr)
            return FAILED
        time.sleep(POLL_S)
    print(f"the trainer ended with code {_code(place)}", flush=True)
    return 0


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(place: Place, arguments: Sequence[str]) -> None:
    for path in (place.code, place.stop, place.pid):
        path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "trainer.tpu.worker", "supervise", *arguments]
    quiet = subprocess.DEVNULL
    supervisor = subprocess.Popen(words, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)
    deadline = time.monotonic() + START_S
    while not place.pid.exists() and not place.code.exists() and supervisor.poll() is None:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)


def _follow(place: Place, begin: int) -> None:
    """Prints what the log has from byte `begin` on, without the times, until the training has ended."""
    place.log.touch()
    with place.log.open(errors="replace") as log:
        log.seek(begin)
        running = True
        while running:
            running = place.is_training
            for line in log:
                print(line.partition(" ")[2], end="", flush=True)
            time.sleep(POLL_S if running else 0)


def _code(place: Place) -> int:
    if not place.code.exists():
        print("the training was killed: it left no exit code; was the machine rebooted?", file=sys.stderr)
        return FAILED
    code = int(place.code.read_text())
    # Before the trainer listens for it, SIGTERM simply ends it; then there is nothing to save yet.
    return STOPPED if code in (SAVED, 128 + signal.SIGTERM) and place.stop.exists() else code


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
