"""Runs Beam's worker processes on this machine; if the launching process or a worker dies, all of
them end.

Beam 2.76 and 2.77 wait forever for an answer from a worker process that was killed (most often
because memory ran out), and leave their workers running if the launching process is killed. Only
its handlers of workers, which aren't documented, can end that wait.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from apache_beam.portability import python_urns
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner.worker_handlers import (
    SubprocessSdkWorkerHandler,
    WorkerHandler,
)
from apache_beam.runners.worker import sdk_worker_main
from google.protobuf import json_format, text_format

from pipelines.runners import fork_server
from shardset.errors import ShardsetError

_ANSWER_INTERVAL_S = 0.1
_EXIT_PATIENCE_S = 1.0


class WorkerGroup:
    """The worker processes of a run; they end together."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._processes: list[BaseProcess] = []
        self._ended = False
        self._failure: int | None = None

    def start(self, environment: Mapping[str, str]) -> BaseProcess:
        """A new worker process with these environment variables; killed at once if the group has
        ended.
        """
        fork_server.begin()
        process = fork_server.CONTEXT.Process(
            target=run_worker, args=(os.environ | environment,), daemon=True
        )
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise ShardsetError(self.record_exit(-signal.SIGKILL)) from error
        with self._news:
            self._processes.append(process)
            if self._ended:
                process.kill()
        return process

    def wait(self, process: BaseProcess) -> int:
        """Waits for a worker to end; returns its exit code, negative for a signal."""
        process.join()
        code = process.exitcode or 0
        with self._news:
            self._failure = self._failure or code or None
            self._news.notify_all()
        return code

    def first_failure(self, timeout_s: float) -> int | None:
        """The exit code of the first worker that failed or was killed; None if none does within the
        timeout.
        """
        with self._news:
            return self._news.wait_for(lambda: self._failure, timeout_s)

    def end(self) -> None:
        """Kills all running workers."""
        with self._news:
            self._ended = True
            for process in self._processes:
                process.kill()

    def record_exit(self, code: int) -> str:
        """Ends the other workers because one died with that exit code; returns the message for the
        user.
        """
        self.end()
        code = self._failure or code
        event = (
            f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        )
        return (
            f"a worker process {event}; if the machine ran out of memory give fewer workers"
            " (--direct_num_workers), --debug shows what it said; run the same command again to"
            " resume"
        )


@contextmanager
def local_workers() -> Iterator[None]:
    """A block in which Beam starts workers of this module; raises ShardsetError if one of them
    dies.
    """
    group = WorkerGroup()
    # Beam chooses its handlers of workers by this registration; an option to choose is not there.
    urn = python_urns.SUBPROCESS_SDK
    WorkerHandler.register_environment(urn, bytes)(partial(_Worker, group))
    try:
        yield
    except RuntimeError as error:  # Beam may notice the closed connection before we notice the exit
        code = group.first_failure(_EXIT_PATIENCE_S)
        if code is None:
            raise
        raise ShardsetError(group.record_exit(code)) from error
    finally:
        group.end()
        # for pipelines of others in this process
        WorkerHandler.register_environment(urn, bytes)(SubprocessSdkWorkerHandler)


class _Worker(SubprocessSdkWorkerHandler):
    """A worker process.

    If it dies, its group ends, and every request to it gets an error as its answer.
    """

    def __init__(self, group: WorkerGroup, *args: Any) -> None:
        super().__init__(*args)
        self._group = group
        self._closing = threading.Event()

    def start_worker(self) -> None:
        """Starts the process and a thread that waits for its end."""
        environment = {
            "WORKER_ID": self.worker_id,
            "CONTROL_API_SERVICE_DESCRIPTOR": text_format.MessageToString(
                self.control_api_service_descriptor()
            ),
            "LOGGING_API_SERVICE_DESCRIPTOR": text_format.MessageToString(
                self.logging_api_service_descriptor()
            ),
            "PIPELINE_OPTIONS": json_format.MessageToJson(
                self.provision_info.provision_info.pipeline_options
            ),
        }
        process = self._group.start(environment)
        self.worker_thread = threading.Thread(target=self._watch, args=(process,), daemon=True)
        self.worker_thread.start()

    def close(self) -> None:
        """Lets the process end by itself, which does not count as a failure."""
        self._closing.set()
        super().close()

    def _watch(self, process: BaseProcess) -> None:
        code, pending = self._group.wait(process), self.control_conn._futures_by_id
        # Repeatedly, because the runner may send further requests until it has seen the first
        # error. `control_conn.abort` is no answer: who reads a worker's results waits for one.
        while not self._closing.wait(_ANSWER_INTERVAL_S):
            error = f"ShardsetError: {self._group.record_exit(code)}"
            for name in list(pending):
                pending.pop(name).set(
                    beam_fn_api_pb2.InstructionResponse(instruction_id=name, error=error)
                )


def _exit_with(launcher: BaseProcess) -> None:
    launcher.join()
    os._exit(1)


def run_worker(environment: dict[str, str]) -> None:
    """Runs a worker process with these environment variables until the launching process no longer
    needs it.
    """
    os.setpgid(0, 0)  # Ctrl-C reaches only the launcher, which ends its workers
    launcher = multiprocessing.parent_process()
    assert launcher, "a worker is not started by hand"
    threading.Thread(target=_exit_with, args=(launcher,), daemon=True).start()
    os.environ.clear()
    os.environ |= environment
    os.dup2(2, 1)  # the result of the launcher goes to standard output
    sdk_worker_main.main(sys.argv)
