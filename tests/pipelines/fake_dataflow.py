"""A small Dataflow service: takes jobs over HTTP and runs them from the files that were staged for
it.

Use it with `--dataflow_endpoint=http://localhost:PORT`, beside a GCS emulator. A job is run in a
process of its own, from `pipeline.pb` as it lies in the staging bucket, by the local runner instead
of in the container that it names.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shardset.storage.open import open_storage


class FakeDataflow:
    """Jobs by id as they were sent, their states, and what went wrong; `refusal` is answered to new
    jobs, if set.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.states: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.failure = ""
        self.refusal: tuple[int, str] | None = None

    def create(self, project: str, region: str, job: dict[str, Any]) -> dict[str, Any]:
        """Takes a job and starts it."""
        found = f"job-{len(self.jobs)}"
        self.jobs[found] = job | {"project": project, "region": region}
        self.states[found] = "JOB_STATE_RUNNING"
        reply = self.describe(found)
        threading.Thread(target=self._run, args=(found,), daemon=True).start()
        return reply

    def describe(self, job: str) -> dict[str, Any]:
        """What the service tells about a job."""
        keep = {
            key: self.jobs[job][key]
            for key in ("name", "clientRequestId", "type")
            if key in self.jobs[job]
        }
        return keep | {"id": job, "currentState": self.states[job]}

    def messages(self, job: str) -> dict[str, Any]:
        """The job's log: its error, if it failed."""
        if job not in self.errors:
            return {}
        line = {"id": "1", "time": "2026-01-01T00:00:00Z", "messageText": self.errors[job]}
        return {"jobMessages": [line | {"messageImportance": "JOB_MESSAGE_ERROR"}]}

    def _run(self, job: str) -> None:
        self.errors |= {job: self.failure} if self.failure else self._run_staged(job)
        self.states[job] = "JOB_STATE_FAILED" if job in self.errors else "JOB_STATE_DONE"

    def _run_staged(self, job: str) -> dict[str, str]:
        folder, _, name = options_of(self.jobs[job])["pipelineUrl"].rpartition("/")
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / name
            file.write_bytes(open_storage(folder).read(name))
            done = subprocess.run([sys.executable, __file__, file], capture_output=True, text=True)
        return {job: done.stderr} if done.returncode else {}


def options_of(job: dict[str, Any]) -> dict[str, Any]:
    """The pipeline options that a job carries to its workers."""
    return job["environment"]["sdkPipelineOptions"]["options"]


@contextmanager
def serve() -> Iterator[tuple[FakeDataflow, str]]:
    """The service and its URL."""
    service = FakeDataflow()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            _, _, project, _, region, what = self.path.partition("?")[0].strip("/").split("/")[:6]
            assert what == "jobs"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if service.refusal:
                code, message = service.refusal
                self._answer({"error": {"code": code, "message": message}}, code)
            else:
                self._answer(service.create(project, region, body))

        def do_GET(self) -> None:
            words = self.path.partition("?")[0].strip("/").split("/")
            job, what = words[6], words[7] if len(words) > 7 else ""
            views = {
                "": service.describe,
                "messages": service.messages,
                "metrics": lambda job: metrics(),
            }
            self._answer(views[what](job))

        def _answer(self, value: dict[str, Any], code: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield service, f"http://localhost:{server.server_port}"
        server.shutdown()


def metrics() -> dict[str, Any]:
    """One counter as Dataflow reports it: twice, the second time as tentative."""
    name = {"origin": "user", "name": "shards_written"}
    context = {"namespace": "shardset", "step": "Write shards"}
    both = [context, context | {"tentative": "true"}]
    return {"metrics": [{"name": name | {"context": each}, "scalar": 6} for each in both]}


def run_file(path: str) -> None:
    """Runs a pipeline that was staged for Dataflow here, its steps in this process instead of a
    container.
    """
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.portability import python_urns
    from apache_beam.portability.api import beam_runner_api_pb2
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    pipeline = beam_runner_api_pb2.Pipeline.FromString(Path(path).read_bytes())
    for environment in pipeline.components.environments.values():
        environment.urn, environment.payload = python_urns.EMBEDDED_PYTHON, b""
        del environment.dependencies[:]
    FnApiRunner().run_via_runner_api(pipeline, PipelineOptions([])).wait_until_finish()


if __name__ == "__main__":
    run_file(sys.argv[1])
