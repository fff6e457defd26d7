"""Requests to stop a run: SIGTERM, a maintenance notice of Google Compute Engine, or a file from the launcher."""

import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance"
RELAY = "TRAINER_PREEMPTION_FILE"
"""Environment variable with the file by which a launcher tells its replicas to stop; see `relay`."""

_RETRY_S = 30.0
_WAIT_S = 60


class PreemptionNotice:
    """True once this process has been asked to stop; a context that listens for SIGTERM where it can.

    Only a main thread receives signals. Replicas that torch_xla starts may not be main threads: for them the launcher
    writes a file.
    """

    def __init__(self, metadata_url: str | None = None) -> None:
        self._requested = threading.Event()
        self._left = threading.Event()
        self._metadata_url = metadata_url
        self._before: object = None

    def __enter__(self) -> "PreemptionNotice":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda *_: self._requested.set())
        if self._metadata_url:
            threading.Thread(target=self._poll_metadata, name="maintenance", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return self._requested.is_set() or _relayed()

    def _poll_metadata(self) -> None:
        while not self._left.is_set() and not self._requested.is_set():
            try:
                if must_stop(self._metadata_url or METADATA):
                    self._requested.set()
            except (OSError, urllib.error.URLError):
                self._left.wait(_RETRY_S)


def must_stop(metadata_url: str) -> bool:
    """Whether the metadata server announces the end of this machine; waits up to a minute for an announcement."""
    if _metadata(f"{metadata_url}/preempted") == "TRUE":
        return True
    event = _metadata(f"{metadata_url}/maintenance-event?wait_for_change=true&timeout_sec={_WAIT_S}")
    return event == "TERMINATE_ON_HOST_MAINTENANCE"


def relay(path: Path) -> None:
    """Passes SIGTERM of this launcher to the replicas that it starts from now on, through a file."""
    path.unlink(missing_ok=True)
    os.environ[RELAY] = str(path)
    signal.signal(signal.SIGTERM, lambda *_: path.touch())


def _relayed() -> bool:
    path = os.environ.get(RELAY)
    return path is not None and Path(path).exists()


def _metadata(url: str) -> str:
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=_WAIT_S + 10) as response:
        data: bytes = response.read()
    return data.decode()
