import http.server
import os
import signal
import threading
import time
from typing import Any

import pytest

from trainer.runtime import preemption
from trainer.runtime.preemption import PreemptionNotice


class Metadata(http.server.BaseHTTPRequestHandler):
    """What Compute Engine's metadata server says: holds a request until its answer has changed."""

    answers: dict[str, str]
    changed: threading.Condition
    held: set[str]
    num_broken: int
    is_closing: bool

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        path, _, query = self.path.partition("?")
        with self.changed:
            if self.num_broken:
                Metadata.num_broken -= 1
                self.wfile.write(b"HTTP/1.1 what\r\n\r\n")
                return
            while f"last_etag={self.etag(path)}" in query and not self.is_closing:
                self.held.add(path)
                self.changed.notify_all()
                self.changed.wait()
            self.send_response(200)
            self.send_header("ETag", self.etag(path))
            self.end_headers()
            self.wfile.write(self.answers[path].encode())

    def etag(self, path: str) -> str:
        return self.answers[path].lower()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata():
    Metadata.answers = {"/preempted": "FALSE", "/maintenance-event": "NONE"}
    Metadata.changed, Metadata.held = threading.Condition(), set()
    Metadata.num_broken, Metadata.is_closing = 0, False
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        answer(is_closing=True)
        server.shutdown()


def answer(path="/preempted", text="FALSE", *, is_closing=False):
    with Metadata.changed:
        Metadata.answers[path], Metadata.is_closing = text, is_closing
        Metadata.changed.notify_all()


def test_sigterm_is_a_notice_and_the_old_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with PreemptionNotice() as notice:
        assert not notice
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("path", "text"),
    [("/preempted", "TRUE"), ("/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")],
)
def test_each_announcement_reaches_the_run_at_once(metadata, path, text):
    with PreemptionNotice(metadata) as notice:
        with Metadata.changed:  # a Spot machine has 30 s from then on
            assert Metadata.changed.wait_for(lambda: len(Metadata.held) == 2, timeout=60)
        answer("/maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        assert not notice
        answer(path, text)
        while not notice:
            time.sleep(0.01)


def test_answers_that_are_not_http_are_asked_for_again(metadata):
    Metadata.num_broken, Metadata.answers["/preempted"] = 2, "TRUE"
    with PreemptionNotice(metadata) as notice:
        while not notice:
            time.sleep(0.01)
    assert Metadata.num_broken == 0


def test_a_run_knows_of_a_sigterm_before_it(
    tmp_path,
    monkeypatch,
):
    monkeypatch.setenv(preemption.RELAY, "")
    before: Any = preemption.listen()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        preemption.relay(tmp_path / "notice")
        assert (tmp_path / "notice").exists()
        with PreemptionNotice() as notice:
            assert notice
        monkeypatch.delenv(preemption.RELAY)
        assert not PreemptionNotice()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_launcher_tells_its_replicas_by_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv(preemption.RELAY, "")
    with PreemptionNotice():  # which puts the handler back
        preemption.relay(tmp_path / "notice")
        notice = PreemptionNotice()
        assert not notice
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice
