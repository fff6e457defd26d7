"""The relay of the stream benchmark, in front of a server of our own."""

import http.client
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.far import relay

DELAY_S, BYTES_PER_S = 0.05, 20e6
ANSWER = bytes(range(256)) * 8192


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)


def test_answers_arrive_whole_late_and_no_faster_than_the_rate_until_the_relay_ends():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        upstream = f"127.0.0.1:{server.server_port}"
        with (
            relay(upstream, delay_s=DELAY_S, bytes_per_s=BYTES_PER_S) as address,
            closing(http.client.HTTPConnection(address, timeout=20)) as connection,
        ):
            for _ in range(2):
                begun = time.perf_counter()
                connection.request("GET", "/")
                assert connection.getresponse().read() == ANSWER
                assert time.perf_counter() - begun >= DELAY_S + len(ANSWER) / BYTES_PER_S
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection(address).connect()
        server.shutdown()
