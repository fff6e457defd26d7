"""The relay of the stream benchmark, in front of a server of our own."""

import socket
import threading
import time
from contextlib import closing

import pytest

from benchmarks.far import relay

DELAY_S, BYTES_PER_S = 0.05, 20e6
ANSWER = bytes(range(256)) * 8192


def receive(connection, num_bytes):
    parts = []
    while num_bytes and (part := connection.recv(min(num_bytes, 1 << 16))):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


@pytest.fixture
def server():
    """Answers every request of five bytes over a connection; `hang up` closes it instead."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection):
        with closing(connection):
            while (asked := receive(connection, 5)) == b"again":
                connection.sendall(ANSWER)
            assert asked in (b"", b"hang!")

    def accept():
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def connect(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_answers_arrive_whole_late_and_no_faster_than_the_rate(server):
    with relay(server, delay_s=DELAY_S, bytes_per_s=BYTES_PER_S) as address, connect(address) as connection:
        for _ in range(2):
            begun = time.perf_counter()
            connection.sendall(b"again")
            assert receive(connection, len(ANSWER)) == ANSWER
            assert time.perf_counter() - begun >= DELAY_S + len(ANSWER) / BYTES_PER_S


def test_each_connection_is_late_alone_and_an_end_is_passed_on(server):
    with relay(server, delay_s=0.0, bytes_per_s=1e9) as address:
        connections = [connect(address) for _ in range(5)]
        for connection in connections:
            connection.sendall(b"again")
        assert {receive(connection, len(ANSWER)) for connection in connections} == {ANSWER}
        connections[0].sendall(b"hang!")
        assert connections[0].recv(1) == b""
        connections[1].close()
        connections[2].sendall(b"again")
        assert receive(connections[2], len(ANSWER)) == ANSWER


def test_it_ends_with_its_block(server):
    with relay(server, delay_s=0.0, bytes_per_s=1e9) as address:
        connect(address).close()
    with pytest.raises(ConnectionRefusedError):
        connect(address)
