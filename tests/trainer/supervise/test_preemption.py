import http.server
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.supervise import preemption
from trainer.supervise.preemption import PreemptionNotice, must_stop


class Metadata(http.server.BaseHTTPRequestHandler):
    """What Compute Engine's metadata server says."""

    answers: dict[str, str]

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answers[self.path.partition("?")[0]].encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    Metadata.answers = {"/preempted": "FALSE", "/maintenance-event": "NONE"}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_sigterm_is_a_notice_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with PreemptionNotice() as notice:
        assert not notice
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_metadata_server_says_whether_to_stop(metadata: str) -> None:
    Metadata.answers["/maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert not must_stop(metadata)
    Metadata.answers["/preempted"] = "TRUE"
    assert must_stop(metadata)


def test_a_maintenance_notice_reaches_the_run(metadata: str) -> None:
    with PreemptionNotice(metadata) as notice:
        Metadata.answers["/maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        while not notice:
            time.sleep(0.01)


def test_a_launcher_tells_its_replicas_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(preemption.RELAY, "")
    with PreemptionNotice():  # which puts the handler back
        preemption.relay(tmp_path / "notice")
        notice = PreemptionNotice()
        assert not notice
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice
