"""Ports for processes that listen a while after a test has chosen them."""

import random
import socket
from contextlib import suppress

_draw = random.SystemRandom()  # two processes of one test run must not choose alike


def free_port() -> int:
    """A port of this machine at which nobody listens, below those that the system gives to anybody (32768 and up)."""
    while True:
        port = _draw.randrange(20_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
