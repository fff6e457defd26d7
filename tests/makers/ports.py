"""Ports for servers of tests, and a wait until one is up."""

import random
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

_draw = random.SystemRandom()  # two processes of one test run must not choose alike


def free_port() -> int:
    """A port of this machine at which nobody listens, below those that the system gives to anybody
    (32768 and up).
    """
    while True:
        port = _draw.randrange(20_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def send_when_up(request: urllib.request.Request) -> None:
    """Sends a request to a server, waiting up to two minutes for it to come up."""
    for _ in range(2400):
        try:
            urllib.request.urlopen(request, timeout=20).close()
            return
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise
            time.sleep(0.05)
    pytest.fail(f"the server of {request.full_url} did not come up", pytrace=False)
