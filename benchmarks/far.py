"""A relay that simulates a distant server: requests are delayed, and each connection has a limited
rate.

    with relay("127.0.0.1:4443", delay_s=0.05, bytes_per_s=200e6) as address:

A separate process, so that its processor time does not count as the readers'. Answers go from
socket to socket inside the kernel (splice), which takes a fraction of the processor time of a proxy
that reads them.
"""

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

_PIECE = 1 << 20
_REQUEST = 1 << 16


@contextmanager
def relay(upstream: str, *, delay_s: float, bytes_per_s: float) -> Iterator[str]:
    """Yields the address, `host:port`, of a relay to the server at `upstream`, which runs until the
    block ends.
    """
    words = [sys.executable, "-m", "benchmarks.far", upstream, str(delay_s), str(bytes_per_s)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()  # by which it ends, as it also does when this process dies


def serve(listener: socket.socket, upstream: str, delay_s: float, bytes_per_s: float) -> None:
    """Relays every connection with two threads."""
    host, _, port = upstream.rpartition(":")
    while True:
        client = listener.accept()[0]
        server = socket.create_connection((host, int(port)))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_requests, args=(client, server, delay_s), daemon=True).start()
        threading.Thread(target=_answers, args=(client, server, bytes_per_s), daemon=True).start()


def _requests(client: socket.socket, server: socket.socket, delay_s: float) -> None:
    """Passes on what the client sends, each piece late; a request without a body is one piece."""
    try:
        while data := client.recv(_REQUEST):
            time.sleep(delay_s)
            server.sendall(data)
        server.shutdown(socket.SHUT_WR)
    except OSError:  # either side hung up: there is nobody left to pass anything to
        return


def _answers(client: socket.socket, server: socket.socket, bytes_per_s: float) -> None:
    """Passes on what the server sends, no piece before its last byte could have arrived."""
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIECE)
    arrived = 0.0
    with closing(client), closing(server), open(out, "rb"), open(into, "wb"):
        try:
            while left := os.splice(server.fileno(), into, _PIECE):
                now = time.perf_counter()
                arrived = max(arrived, now) + left / bytes_per_s
                time.sleep(arrived - now)
                while left:
                    left -= os.splice(out, client.fileno(), left)
            client.shutdown(socket.SHUT_RDWR)  # which ends the other thread too
        except OSError:  # as above
            return


def main() -> None:
    """`UPSTREAM DELAY_S BYTES_PER_S`: prints its address, ends when its input does."""
    upstream, delay_s, bytes_per_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
        threading.Thread(
            target=serve, args=(listener, upstream, delay_s, bytes_per_s), daemon=True
        ).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
