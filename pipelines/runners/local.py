"""Worker processes on this machine that neither outlive the build nor die unnoticed.

Beam 2.77 waits without end for an answer from a worker process that was killed (out of memory, most often), and
leaves its workers running when the launching process is killed. Here a death of either side ends the other.
"""

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from apache_beam.portability import python_urns
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner.worker_handlers import SubprocessSdkWorkerHandler, WorkerHandler
from google.protobuf import json_format, text_format

from pipelines.runners.forkserver import ForkServer, serve
from shardset.errors import ShardsetError

_LOOK_AGAIN_S = 0.1
_TELLS_WITHIN_S = 1.0


class _Crew:
    """The worker processes of one run, and the code that the first of them died with."""

    def __init__(self, server: ForkServer | None) -> None:
        self._server = server
        self.first_death: int | None = None

    @property
    def server(self) -> ForkServer:
        """Who starts them; begun when the first is asked for, unless one was given."""
        self._server = self._server or ForkServer()
        return self._server

    def mourn(self, code: int) -> str:
        """Notes a death, ends those who are left, and says what the user should know."""
        self.first_death = code if self.first_death is None else self.first_death
        self.end()
        return _obituary(self.first_death)

    def end(self) -> None:
        """Ends all of them at once."""
        if self._server:
            self._server.close()

    def failure(self) -> int | None:
        """What one of them died with, if Beam's error may be about that."""
        return self._server.first_failure(_TELLS_WITHIN_S) if self._server else None

    @contextmanager
    def ended_by_ctrl_c(self) -> Iterator[None]:
        """In the block Ctrl-C ends them before anything else: both sides would tell of connections that they lost."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield
            return

        def end_first(number: int, frame: FrameType | None) -> None:
            tell, beams = threading.excepthook, set(threading.enumerate())
            threading.excepthook = lambda lost: None if lost.thread in beams else tell(lost)
            self.end()
            before(number, frame)

        signal.signal(signal.SIGINT, end_first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def watched(server: ForkServer | None = None) -> Iterator[None]:
    """Local worker processes of a pipeline run in the block are ours; raises ShardsetError if one of them died.

    `server` starts them, where one has been started before; it is closed at the end.
    """
    crew = _Crew(server)
    WorkerHandler.register_environment(python_urns.SUBPROCESS_SDK, bytes)(partial(_Worker, crew))
    try:
        with crew.ended_by_ctrl_c():
            yield
    except RuntimeError as error:  # Beam may see a closed connection before we hear of the death
        dead = crew.failure()
        if dead is None:
            raise
        raise ShardsetError(crew.mourn(dead)) from error
    finally:
        crew.end()


class _Worker(SubprocessSdkWorkerHandler):
    """One worker process. When it dies, all of its crew are ended and every request to it is answered by an error."""

    def __init__(self, crew: _Crew, *args: Any) -> None:
        super().__init__(*args)
        self._crew = crew
        self._closing = threading.Event()

    def start_worker(self) -> None:
        """Starts the process."""
        self._crew.server.start(self.worker_id, self._environment())
        self.worker_thread = threading.Thread(target=self._watch, daemon=True)
        self.worker_thread.start()

    def close(self) -> None:
        """Lets the process end by itself, which is no death."""
        self._closing.set()
        super().close()

    def _environment(self) -> dict[str, str]:
        return {
            "WORKER_ID": self.worker_id,
            "CONTROL_API_SERVICE_DESCRIPTOR": text_format.MessageToString(self.control_api_service_descriptor()),
            "LOGGING_API_SERVICE_DESCRIPTOR": text_format.MessageToString(self.logging_api_service_descriptor()),
            "PIPELINE_OPTIONS": json_format.MessageToJson(self.provision_info.provision_info.pipeline_options),
        }

    def _watch(self) -> None:
        code = self._crew.server.wait(self.worker_id)
        # Again and again, because the runner may ask the dead for more until it has seen the first error.
        while not self._closing.wait(_LOOK_AGAIN_S):
            self._answer_all(f"ShardsetError: {self._crew.mourn(code)}")

    def _answer_all(self, error: str) -> None:
        waiting = self.control_conn._futures_by_id
        for name in list(waiting):
            waiting.pop(name).set(beam_fn_api_pb2.InstructionResponse(instruction_id=name, error=error))


class _Patient(io.FileIO):
    """Loses what can't be written: Beam prints a failure before it answers, and would never answer if that failed."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:  # the disk of a log is full, most often the reason of the failure itself
            return len(data)


def _obituary(code: int) -> str:
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
    return (
        f"a worker process {how}; if the machine ran out of memory give fewer workers "
        "(--direct_num_workers), --debug shows what it said; the same command goes on from here"
    )


def main() -> None:
    """A fork server's process, and each worker: that serves the launching process until it is needed no more."""
    from apache_beam.runners.worker import sdk_worker_main

    import pipelines.pipeline  # noqa: F401  # what the elements of a build unpickle to

    os.environ.update(serve())
    sys.stderr = io.TextIOWrapper(_Patient(2, "w", closefd=False), errors="backslashreplace", write_through=True)
    sdk_worker_main.main(sys.argv)
    gc.freeze()  # else Python looks through everything as it ends: 0.4 s of each worker, one after the other


if __name__ == "__main__":
    main()
