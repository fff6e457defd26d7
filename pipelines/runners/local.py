"""Worker processes on this machine that neither outlive the build nor die unnoticed.

Beam 2.77 waits forever for an answer from a worker process that was killed (most often because memory ran out), and
leaves its workers running when the launching process is killed. Here the death of either side ends the other.
"""

import gc
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from apache_beam.portability import python_urns
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner.worker_handlers import SubprocessSdkWorkerHandler, WorkerHandler
from google.protobuf import json_format, text_format

from shardset.errors import ShardsetError

_ANSWER_INTERVAL_S = 0.1
_EXIT_PATIENCE_S = 1.0

_RETURN_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(2**18),
    "MALLOC_TRIM_THRESHOLD_": str(2**18),
}
"""For glibc's malloc, which otherwise keeps a fifth of a worker's peak; the user's own settings win."""


class WorkerGroup:
    """The worker processes of one run; they end together."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = False
        self._failure: int | None = None

    def start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A new worker process with these variables in its environment; killed at once if the group has ended."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines.runners.local"],  # -P: a random.py in this folder is not Python's
            stdin=subprocess.PIPE,  # its end tells the worker that the launcher is gone
            stdout=2,  # standard output belongs to the launcher's result
            env=_RETURN_FREED_MEMORY | os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(environment),
            process_group=0,  # Ctrl-C reaches the launcher alone, which ends its workers
        )
        with self._news:
            self._processes.append(process)
            if self._ended:
                process.kill()
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code of a worker once it has ended; negative for a signal."""
        code = process.wait()
        if process.stdin:
            process.stdin.close()
        with self._news:
            self._failure = self._failure or code or None
            self._news.notify_all()
        return code

    def first_failure(self, timeout_s: float) -> int | None:
        """The exit code of the first worker that failed or was killed; None if none does within that time."""
        with self._news:
            return self._news.wait_for(lambda: self._failure, timeout_s)

    def end(self) -> None:
        """Kills all workers that still run."""
        with self._news:
            self._ended = True
            for process in self._processes:
                process.kill()

    def record_exit(self, code: int) -> str:
        """Ends the other workers because one died; returns what the user should know."""
        self.end()
        return exit_message(self._failure or code)


@contextmanager
def local_workers() -> Iterator[None]:
    """A block in which Beam's local worker processes are ours; raises ShardsetError if one of them dies."""
    group = WorkerGroup()
    WorkerHandler.register_environment(python_urns.SUBPROCESS_SDK, bytes)(partial(_Worker, group))
    try:
        with _ended_by_ctrl_c(group):
            yield
    except RuntimeError as error:  # Beam may see the closed connection before we see the exit
        code = group.first_failure(_EXIT_PATIENCE_S)
        if code is None:
            raise
        raise ShardsetError(group.record_exit(code)) from error
    finally:
        group.end()


@contextmanager
def _ended_by_ctrl_c(group: WorkerGroup) -> Iterator[None]:
    """Ends the workers first on Ctrl-C: otherwise both sides would report connections that they lost."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def end_workers(number: int, frame: FrameType | None) -> None:
        report, threads_of_beam = threading.excepthook, set(threading.enumerate())
        threading.excepthook = lambda args: None if args.thread in threads_of_beam else report(args)
        group.end()
        previous(number, frame)

    signal.signal(signal.SIGINT, end_workers)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class _Worker(SubprocessSdkWorkerHandler):
    """One worker process. If it dies, its group ends and every request to it is answered with an error."""

    def __init__(self, group: WorkerGroup, *args: Any) -> None:
        super().__init__(*args)
        self._group = group
        self._closing = threading.Event()

    def start_worker(self) -> None:
        """Starts the process and a thread that watches it."""
        process = self._group.start(self._environment())
        self.worker_thread = threading.Thread(target=self._watch, args=(process,), daemon=True)
        self.worker_thread.start()

    def close(self) -> None:
        """Lets the process end by itself, which is no failure."""
        self._closing.set()
        super().close()

    def _environment(self) -> dict[str, str]:
        return {
            "WORKER_ID": self.worker_id,
            "CONTROL_API_SERVICE_DESCRIPTOR": text_format.MessageToString(self.control_api_service_descriptor()),
            "LOGGING_API_SERVICE_DESCRIPTOR": text_format.MessageToString(self.logging_api_service_descriptor()),
            "PIPELINE_OPTIONS": json_format.MessageToJson(self.provision_info.provision_info.pipeline_options),
        }

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        code = self._group.wait(process)
        # Repeatedly, because the runner may send further requests until it has seen the first error.
        while not self._closing.wait(_ANSWER_INTERVAL_S):
            self._answer_all(f"ShardsetError: {self._group.record_exit(code)}")

    def _answer_all(self, error: str) -> None:
        pending = self.control_conn._futures_by_id
        for name in list(pending):
            pending.pop(name).set(beam_fn_api_pb2.InstructionResponse(instruction_id=name, error=error))


class _LossyStandardError(io.FileIO):
    """Drops what can't be written: Beam prints a failure before it reports it, and must not fail at the printing."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:  # the disk of a log is full, which is most often the failure itself
            return len(data)


def exit_message(code: int) -> str:
    """What to tell the user about a worker process that ended with that code; negative for a signal."""
    event = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
    return (
        f"a worker process {event}; if the machine ran out of memory give fewer workers "
        "(--direct_num_workers), --debug shows what it said; the same command goes on from here"
    )


def _exit_with_launcher() -> None:
    os.read(0, 1)  # nothing is ever written: this returns when the launcher is gone
    os._exit(1)


def main() -> None:
    """Runs one worker process: serves the launching process until it is no longer needed."""
    threading.Thread(target=_exit_with_launcher, daemon=True).start()
    from apache_beam.runners.worker import sdk_worker_main

    sys.stderr = io.TextIOWrapper(
        _LossyStandardError(2, "w", closefd=False), errors="backslashreplace", write_through=True
    )
    sdk_worker_main.main(sys.argv)
    gc.freeze()  # otherwise Python searches everything for garbage as it ends: 0.4 s for each worker


if __name__ == "__main__":
    main()
