"""Processes that watch each other: real ones, which are killed, stopped and ended, with a short
patience.
"""

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from subprocess import PIPE, STDOUT, Popen

import pytest

from shardset.errors import ConfigError
from tests.makers.ports import free_port
from tests.makers.watched import CAUGHT
from trainer.errors import PeerLost
from trainer.runtime import heartbeat

FAILED, PREEMPTED = 1, 3

Start = Callable[..., Popen[str]]


@pytest.fixture
def start():
    """Starts process `host` of so many that does something; what is left at the end is killed."""
    port, started = free_port(), []

    def one(host: int, num_hosts: int, what: str) -> Popen[str]:
        words = [
            sys.executable,
            "-m",
            "tests.makers.watched",
            str(port),
            str(host),
            str(num_hosts),
            what,
        ]
        started.append(Popen(words, stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.communicate()


def ready(*processes: Popen[str]):
    """Waits until each stands where it will act and all know each other, and lets them."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def end_of(process):
    output, _ = process.communicate(timeout=600)
    return process.returncode, output.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "sent", "word"),
    [
        (0, signal.SIGKILL, "died"),
        (1, signal.SIGKILL, "died"),
        pytest.param(1, signal.SIGSTOP, "hangs", marks=pytest.mark.nightly),
    ],
)
def test_those_who_wait_for_a_lost_process_in_native_code_say_so_and_end(start, sent, word, lost):
    processes = [start(host, 3, "wait") for host in range(3)]
    ready(*processes)
    os.kill(processes[lost].pid, sent)
    who = f"process 1 (pid {processes[1].pid} on {socket.gethostname()}) after step 11"
    for host in {0, 1, 2} - {lost}:
        code, lines = end_of(processes[host])
        assert code == FAILED, lines
        noted, said = lines[-2:]
        assert said == noted.replace("noted", "PeerLost")
        assert (
            f"another process of this run {word}: {who if lost else 'the one that listens on port'}"
            in said
        )
        assert said.endswith("the same command resumes from the last checkpoint")


def test_a_main_thread_that_ends_by_itself_after_a_loss_is_let_go(start):
    processes = [start(0, 2, "give up"), start(1, 2, "wait")]
    ready(*processes)
    processes[1].kill()
    code, lines = end_of(processes[0])
    assert (code, [line.partition(":")[0] for line in lines]) == (CAUGHT, ["noted"])


@pytest.mark.parametrize("host", [0, 1])
def test_a_process_that_fails_is_named_with_its_error_by_those_who_wait_for_it(start, host):
    failing, waiting = start(host, 2, "fail"), start(1 - host, 2, "wait")
    ready(failing, waiting)
    code, lines = end_of(failing)
    assert (code, lines[-1]) == (FAILED, "trainer.errors.NotFinite: the loss is nan")
    code, lines = end_of(waiting)
    assert code == FAILED
    expected = (
        rf"PeerLost: .* failed: process {host} \(pid .*\) after step {10 + host}: NotFinite: the"
        r" loss is nan; the"
    )
    assert re.match(expected, lines[-1]), lines


@pytest.mark.slow
def test_processes_that_end_well_one_after_the_other_hear_of_no_loss(start):
    whats = {"later": 0, "end": 0, "preempted": PREEMPTED}
    processes = [start(host, len(whats), what) for host, what in enumerate(whats)]
    ready(*processes)
    assert [end_of(process) for process in processes] == [(code, []) for code in whats.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "num_hosts", "expected"),
    [
        (0, 3, "2 of 3 processes of this run, such as number 1, did not reach port"),
        (
            1,
            2,
            r"no way to port \d+ of 127.0.0.1 within 3 s .*allow this TCP port between the hosts",
        ),
    ],
)
def test_a_process_that_does_not_come_is_named(start, host, num_hosts, expected):
    code, lines = end_of(start(host, num_hosts, "wait alone"))
    assert code == FAILED
    assert re.search(expected, lines[-1])


def test_a_port_that_is_taken_is_an_error_that_names_it():
    with (
        heartbeat.HeartbeatServer(heartbeat.Address("127.0.0.1", 0)) as server,
        pytest.raises(ConfigError, match=f"can't listen on port {server.address.port}"),
    ):
        heartbeat.HeartbeatServer(server.address)


def test_a_process_passes_over_the_servers_of_an_earlier_start():
    timing = heartbeat.HeartbeatTiming(beat_s=0.05)
    anywhere = heartbeat.Address("127.0.0.1", 0, "of now")
    with (
        heartbeat.HeartbeatServer(anywhere, timing) as live,
        heartbeat.HeartbeatServer(anywhere, timing) as losing,
    ):
        with heartbeat.HeartbeatServer(anywhere, timing) as ended:
            pass
        losing._answer = heartbeat.Message(lost="process 1 died")
        # The port of an ended server may have another one.
        stale = [ended.address, losing.address, live.address._replace(token="of then")]
        published = iter([*stale, live.address])
        assert heartbeat.find_server(lambda: next(published), timing) == live.address
        assert live._answer.lost is None
        with pytest.raises(PeerLost, match=f"no way to port {ended.address.port} .*resumes from"):
            heartbeat.find_server(
                lambda: ended.address, heartbeat.HeartbeatTiming(beat_s=0.05, join_s=0)
            )


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"{}\n[1]\n",
        b"x" * 100_000,
        b'{"lost": "all"}\n',
        b'{"who": "process 1", "host": 1, "num_hosts": 2, "end": "boom"}\n',
        '{"who": "process 1", "host": 1, "token": "é", "end": "boom"}\n'.encode(),
    ],
)
def test_strangers_at_the_port_harm_nobody(said):
    timing = heartbeat.HeartbeatTiming(beat_s=0.05)
    with heartbeat.HeartbeatServer(heartbeat.Address("127.0.0.1", 0, "secret"), timing) as server:
        own = heartbeat.HeartbeatClient(timing)
        own.start(server.address, 0, 1)
        with socket.create_connection(server.address[:2]) as stranger:
            stranger.sendall(said)
            with suppress(ConnectionResetError):
                assert not stranger.recv(100).replace(b"{}\n", b"")
        own.leave(None)
    assert (server._answer.lost, own._loss) == (None, None)


def test_what_a_peer_says_cannot_control_a_log_or_a_terminal():
    timing, told = heartbeat.HeartbeatTiming(beat_s=0.05, grace_s=60), threading.Event()
    with heartbeat.HeartbeatServer(heartbeat.Address("127.0.0.1", 0), timing) as server:
        own = heartbeat.HeartbeatClient(timing)
        own.on_loss = lambda text: told.set()
        own.start(server.address, 0, 2)
        with socket.create_connection(server.address[:2]) as peer:
            peer.sendall(b'{"who": "one\\n\\u001b[2J", "host": 1, "end": "bad\\r\\u0007"}\n')
            assert told.wait(60)
        own.leave(None)
    assert own._loss is not None
    assert r"failed: one\n\x1b[2J after no step: bad\r\x07; the same" in own._loss
