"""A run that is stopped or cut off from its bucket in its last save, while another run takes the
folder and ends.
"""

import signal
import subprocess
import sys
import threading
import time
from typing import Literal
from urllib.parse import unquote

from shardset.storage.open import open_storage
from tests.faulty_proxy import Fault, FaultyProxy, Seen
from tests.makers.training import arguments, clean_environment, finish, tiny_config
from trainer.record import checkpoint

BEAT_S, PATIENCE_S = 1.0, 4.0
LAST = 6

Way = Literal["stopped", "cut off"]
Moment = Literal["verify", "mark"]
"""The request of the last save at which it happens."""
Arrival = Literal["late", "at once"]
"""When that request reaches the bucket. Of a run that is cut off, `late` never does."""


def attempt(
    server: str, manifest: str, root: str, way: Way, moment: Moment, arrival: Arrival
) -> None:
    """Both runs, each to its end. STORAGE_EMULATOR_HOST must name the server.

    Raises AssertionError unless the second one is done, and the first says in one sentence that its
    folder was taken, and changes nothing of the second one.
    """
    words = arguments(
        tiny_config(manifest, root, max_steps=LAST, checkpoint_every_steps=2, keep_checkpoints=2)
    )
    with FaultyProxy(server) as proxy:
        first = _start(words, proxy.url)
        interruption = _Interruption(first, way, moment, arrival)
        proxy.script = interruption.look
        if not interruption.began.wait(300):
            raise AssertionError(finish(first, 5)[1])
        storage = open_storage(root)
        found_there = {stat.name: stat.generation for stat in storage.list()}
        other_code, other_output = finish(_start(words, server))
        assert other_code == 0, other_output
        # What the second run wrote: of what it found there, a late request may still remove an old
        # checkpoint.
        before = {(stat.name, stat.generation) for stat in storage.list()} - found_there.items()
        mark = checkpoint.newest(storage, print)
        interruption.over.set()
        time.sleep(0.5)  # what is late arrives
        first.send_signal(signal.SIGCONT)
        code, output = finish(first)
    assert before <= {(stat.name, stat.generation) for stat in storage.list()}
    newest = checkpoint.newest(storage, print)
    assert mark is not None
    assert newest is not None
    assert newest[0] == mark[0]
    assert newest[0].step == LAST
    assert (code, output.splitlines()[-1].partition(" ")[0]) == (1, "RunTaken:"), output
    assert "Traceback" not in output


def _start(words: list[str], server: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.makers.impatient", str(BEAT_S), str(PATIENCE_S), *words[2:]],
        env=clean_environment() | {"STORAGE_EMULATOR_HOST": server, "PJRT_DEVICE": "CPU"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class _Interruption:
    """Stops a process, or cuts it off, from a certain request on until `over` is set."""

    def __init__(
        self, process: subprocess.Popen[str], way: Way, moment: Moment, arrival: Arrival
    ) -> None:
        self.began, self.over = threading.Event(), threading.Event()
        self._process, self._way, self._moment, self._arrival = process, way, moment, arrival

    def look(self, seen: Seen) -> Fault | None:
        """A script for the proxy."""
        if self.began.is_set():
            return Fault("reset") if self._way == "cut off" and not self.over.is_set() else None
        if not self._is_moment(seen):
            return None
        if self._way == "cut off":
            self.began.set()
            return Fault("reset" if self._arrival == "late" else "lose")
        self._process.send_signal(signal.SIGSTOP)
        self.began.set()
        if self._arrival == "late":
            self.over.wait(600)
        return None

    def _is_moment(self, seen: Seen) -> bool:
        if self._moment == "verify":
            return seen.method == "GET" and f"step-{LAST:09d}/state" in unquote(seen.path)
        return seen.method == "POST" and f"step-{LAST:09d}/commit.json".encode() in seen.start
