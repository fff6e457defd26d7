"""Runs `shardset build` as a separate process, and kills it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from shardset.storage.open import open_storage

Victim = Literal["launcher", "fork server", "worker", "everything"]


class Life:
    """One build from its start to its end; as a context manager it leaves no process behind."""

    def __init__(self, words: Sequence[object], log: Path, verb: str = "build") -> None:
        command = [sys.executable, "-m", "pipelines", verb, "--json", *map(str, words)]
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in self.members():
            _kill(pid)
        self.process.communicate()

    def members(self) -> dict[int, str]:
        """The command lines of all living processes of this build by process id, orphans too."""
        return {pid: command for pid, (_, _, command) in self._facts().items()}

    def fork_servers(self) -> list[int]:
        """The process id of what workers are forked from, in a list; empty if it does not live."""
        return self._forked(lambda parent: parent == self.process.pid)

    def workers(self) -> list[int]:
        """The process ids of all living workers."""
        return self._forked(lambda parent: parent != self.process.pid)

    def _forked(self, is_parent: Callable[[int], bool]) -> list[int]:
        facts = self._facts().items()
        return sorted(
            pid
            for pid, (parent, _, words) in facts
            if "runners.preloaded" in words and is_parent(parent)
        )

    def _facts(self) -> dict[int, tuple[int, int, str]]:
        found = {int(entry): _facts(entry) for entry in os.listdir("/proc") if entry.isdigit()}
        return {
            pid: facts for pid, facts in found.items() if facts and facts[1] == self.process.pid
        }

    def kill(self, victim: Victim, draw: random.Random) -> bool:
        """SIGKILL to one process or to all, and whether it came in time; waits for a worker, where
        it has to be one.
        """
        if victim == "worker":
            found = self._wait_for_workers()
            return bool(found) and _kill(draw.choice(found))
        if victim == "fork server":
            return any(map(_kill, self.fork_servers()))
        if self.process.poll() is None:
            for pid in self.members() if victim == "everything" else [self.process.pid]:
                _kill(pid)
            return True
        return False

    def _wait_for_workers(self) -> list[int]:
        while self.process.poll() is None:
            found = self.workers()
            if found:
                return found
            time.sleep(0.01)
        return []

    def wait(self, timeout_s: float = 900.0) -> tuple[int, str, str]:
        """The launcher's exit code, standard output and standard error."""
        output = self.process.communicate(timeout=timeout_s)[0]
        return self.process.returncode, output, self._log.read_text(errors="replace")

    def wait_for_orphans(self, timeout_s: float = 600.0) -> dict[int, str]:
        """Who is still there when all should be gone."""
        end = time.monotonic() + timeout_s
        while self.members() and time.monotonic() < end:
            time.sleep(0.02)
        return self.members()


def finish(words: Sequence[object], log: Path, verb: str = "build") -> dict[str, int]:
    """Runs a build to its end and returns its counters."""
    with Life(words, log, verb) as life:
        code, output, errors = life.wait()
    assert code == 0, errors
    return json.loads(output)["counters"]


def wait_for_objects(life: Life, url: str, num_objects: int) -> None:
    """Returns when that many objects stand in the output, or the build has ended."""
    storage = open_storage(url)
    while life.process.poll() is None and sum(1 for _ in storage.list()) < num_objects:
        time.sleep(0.01)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _facts(pid: str) -> tuple[int, int, str] | None:
    """(parent, session, command line) of a process; None if it is gone or waits for its parent to
    notice that it is.
    """
    try:
        state, parent, _, session = (
            Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[:4]
        )
        command = (
            Path("/proc", pid, "cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else (int(parent), int(session), command)
