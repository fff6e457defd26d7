"""Requests to stop a run: SIGTERM, a maintenance notice of Google Compute Engine, or a file from the launcher."""

import os
import signal
import threading
import urllib.request
from pathlib import Path

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance"
RELAY = "TRAINER_PREEMPTION_FILE"
"""Environment variable that names the file with which a launcher tells its replicas to stop; see `relay`."""

_RETRY_S = 30.0
_WAIT_S = 60
"""How long the metadata server may hold a request for an announcement."""


class PreemptionNotice:
    """True once this process is asked to stop. As a context it handles SIGTERM, if it is entered in the main thread.

    Only a main thread can handle signals. Replicas that torch_xla starts may be other threads: for them the launcher
    creates a file.
    """

    def __init__(self, metadata_url: str | None = None) -> None:
        self._requested, self._left = threading.Event(), threading.Event()
        self._metadata_url = metadata_url
        self._before: object = None

    def __enter__(self) -> "PreemptionNotice":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda *_: self._requested.set())
        if self._metadata_url:
            url = self._metadata_url
            threading.Thread(target=lambda: self._poll_metadata(url), name="maintenance", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._left.set()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        path = os.environ.get(RELAY)
        return self._requested.is_set() or (path is not None and Path(path).exists())

    def _poll_metadata(self, url: str) -> None:
        while not self._left.is_set() and not self._requested.is_set():
            try:
                if must_stop(url):
                    self._requested.set()
            except OSError:
                self._left.wait(_RETRY_S)


def must_stop(metadata_url: str) -> bool:
    """Whether the metadata server announces the end of this machine. Waits up to a minute for an announcement."""
    if _metadata(f"{metadata_url}/preempted") == "TRUE":
        return True
    event = _metadata(f"{metadata_url}/maintenance-event?wait_for_change=true&timeout_sec={_WAIT_S}")
    return event == "TERMINATE_ON_HOST_MAINTENANCE"


def relay(path: Path) -> None:
    """Passes SIGTERM on to the replicas that this launcher starts from now on, by creating the file."""
    path.unlink(missing_ok=True)
    os.environ[RELAY] = str(path)
    signal.signal(signal.SIGTERM, lambda *_: path.touch())


def _metadata(url: str) -> str:
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=_WAIT_S + 10) as response:
        data: bytes = response.read()
    return data.decode()
