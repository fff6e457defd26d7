"""Requests to stop a run: SIGTERM, a notice of Compute Engine, or a file from the launcher."""

import http.client
import os
import signal
import threading
import urllib.request
from pathlib import Path

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance"
RELAY = "TRAINER_PREEMPTION_FILE"
"""Environment variable that names the file with which a launcher tells its replicas to stop; see
`relay`.
"""

ANNOUNCEMENTS = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
"""The metadata server's words before this machine ends: 30 s before, on a Spot machine."""

_PAUSE_S = 2.0
"""Between two requests, which the server holds until its answer changes, or for `_WAIT_S`."""
_WAIT_S = 60

_asked = threading.Event()
"""Whether this process got a SIGTERM that no run has answered."""


def listen() -> object:
    """Notes a SIGTERM from now on, for the run of this process. Returns the handler before."""
    return signal.signal(signal.SIGTERM, lambda *_: _asked.set())


class PreemptionNotice:
    """True once this process is asked to stop.

    As a context it handles SIGTERM, if it is entered in the main thread.

    Only a main thread can handle signals. Replicas that torch_xla starts may be other threads: for
    them the launcher creates a file.
    """

    def __init__(self, metadata_url: str | None = None) -> None:
        self._requested, self._left = threading.Event(), threading.Event()
        self._metadata_url = metadata_url
        self._before: object = None

    def __enter__(self) -> "PreemptionNotice":
        if threading.current_thread() is threading.main_thread():
            self._before = listen()
        for name in ANNOUNCEMENTS if self._metadata_url else ():
            threading.Thread(target=self._await, args=[name], name=name, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._left.set()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]
            _asked.clear()

    def __bool__(self) -> bool:
        path = os.environ.get(RELAY)
        is_asked = self._requested.is_set() or _asked.is_set()
        return is_asked or (path is not None and Path(path).exists())

    def _await(self, name: str) -> None:
        etag = "NONE"  # no answer has it, so the first one comes at once
        while not self._left.is_set() and not self._requested.is_set():
            query = f"wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={etag}"
            request = urllib.request.Request(
                f"{self._metadata_url}/{name}?{query}", headers={"Metadata-Flavor": "Google"}
            )
            try:
                with urllib.request.urlopen(request, timeout=_WAIT_S + 10) as response:
                    etag, answer = response.headers.get("ETag", "NONE"), response.read()
            except (OSError, http.client.HTTPException):
                etag, answer = "NONE", b""
            if answer == ANNOUNCEMENTS[name].encode():
                self._requested.set()
            self._left.wait(_PAUSE_S)


def relay(path: Path) -> None:
    """Passes SIGTERM on to the replicas that this launcher starts from now on, by creating the
    file.
    """
    path.unlink(missing_ok=True)
    os.environ[RELAY] = str(path)
    signal.signal(signal.SIGTERM, lambda *_: path.touch())
    if _asked.is_set():
        path.touch()
