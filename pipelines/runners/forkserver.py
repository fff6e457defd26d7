"""A process that imports what a worker needs, once, and forks the workers of a build from itself.

Apache Beam takes one to two seconds to import. Here that happens once instead of once a worker, and while the
launching process imports it too. It is multiprocessing's idea of a fork server without the user's main module.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Self

CAN_FORK = sys.platform == "linux"
"""Elsewhere a library may have started threads that a fork doesn't survive, so a server becomes its first worker."""

_ONE = "--one"

_FREED_IS_RETURNED = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(2**18),
    "MALLOC_TRIM_THRESHOLD_": str(2**18),
}
"""For glibc's malloc, which keeps a fifth of a worker's peak otherwise; the user's own settings win."""


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ForkServer:
    """The server as its launcher sees it; it starts at once. To be closed, which ends its workers too.

    With `forks` false it becomes the first worker itself, and each further one is a server of its own.
    """

    def __init__(self, *, forks: bool = CAN_FORK) -> None:
        self._forks = forks
        self._servers: list[_Server] = []
        self._codes: dict[str, int] = {}
        self._news = threading.Condition()
        self._add()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, name: str, environment: Mapping[str, str]) -> None:
        """One more worker of that name, with those variables in its environment."""
        with self._news:
            if self._servers[-1].names and not self._forks:
                self._add()
            server = self._servers[-1]
            server.names.append(name)
        with suppress(BrokenPipeError):  # whoever waits for it is told
            server.requests.write(json.dumps([name, dict(environment)]).encode() + b"\n")
            server.requests.flush()

    def wait(self, name: str) -> int:
        """The code that worker ended with, once it has; negative for a signal, its server's if that went first."""
        with self._news:
            self._news.wait_for(lambda: name in self._codes or self._server_of(name).code is not None)
            return self._codes.get(name, self._server_of(name).code or 0)

    def first_failure(self, timeout_s: float) -> int | None:
        """The code of a worker that failed or was killed; None if none has within that time."""
        with self._news:
            return self._news.wait_for(self._failure, timeout_s) or None

    def close(self) -> None:
        """Ends all workers at once."""
        for server in self._servers:
            with suppress(ProcessLookupError):
                if server.process.poll() is None:
                    os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
            with suppress(BrokenPipeError):
                server.requests.close()

    def _add(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines.runners.local", *([] if self._forks else [_ONE])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_FREED_IS_RETURNED | os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # it imports what we do
            process_group=0,
        )
        assert process.stdin
        self._servers.append(_Server(process, process.stdin))
        threading.Thread(target=self._listen, args=(self._servers[-1],), daemon=True).start()

    def _server_of(self, name: str) -> "_Server":
        return next(server for server in self._servers if name in server.names)

    def _failure(self) -> int | None:
        return next(filter(None, [*self._codes.values(), *(server.code for server in self._servers)]), None)

    def _listen(self, server: "_Server") -> None:
        assert server.process.stdout
        with server.process.stdout as reports:
            for line in reports:
                name, code = json.loads(line)
                with self._news:
                    self._codes[name] = code
                    self._news.notify_all()
        code = server.process.wait()
        with self._news:
            server.code = code
            self._news.notify_all()


@dataclass
class _Server:
    process: subprocess.Popen
    requests: IO[bytes]
    names: list[str] = field(default_factory=list)
    code: int | None = None


def serve() -> dict[str, str]:
    """Forks a worker for each request on standard input; returns in the worker, with its environment.

    Ends the process at the end of standard input, which is when the launcher is gone; a worker ends with its server.
    """
    reports = os.dup(1)
    os.dup2(2, 1)  # standard output is the launcher's, for its result
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the launcher that stops
    gc.freeze()  # else the first collection in each worker copies what they share
    if _ONE in sys.argv:
        for line in sys.stdin.buffer:
            _end_with(sys.stdin.fileno())
            return json.loads(line)[1]
        sys.exit()
    alive, held = os.pipe()  # nothing is ever written: it ends with the only process that holds it
    names: dict[int, str] = {}

    def report(*_: object) -> None:
        for pid in list(names):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                os.write(reports, json.dumps([names.pop(pid), os.waitstatus_to_exitcode(status)]).encode() + b"\n")

    signal.signal(signal.SIGCHLD, report)
    for line in sys.stdin.buffer:
        name, environment = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until its name is known
        pid = os.fork()
        if pid:
            names[pid] = name
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(held)
            os.close(reports)
            _end_with(alive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if not pid:
            return environment
    sys.exit()


def _end_with(pipe: int) -> None:
    """Ends this process as soon as nobody holds the other end of that pipe."""

    def wait() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
