"""Ends all processes of a run when one of them dies or hangs, even if they wait for it in native
code.

One process of a run starts the `HeartbeatServer`. Every process that trains has a
`HeartbeatClient`: a thread with a TCP connection to the server, over which it sends its state every
second, and gets an answer. A process that ends reports this first, with its error. A connection
that closes without a report, and silence, count as a loss. Then the answers name the process that
was lost. Each client logs it, and ends its process if that does not end within `grace_s`.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, Self

import msgspec

from shardset.errors import ConfigError, printable
from shardset.prepared import JSON_ERRORS, prepared
from trainer.errors import PeerLost, Preempted

PORT = 8490
"""Port of the server on the first worker of a TPU slice; libtpu uses others (8471, and 8476
onwards).
"""

AGAIN = "the same command resumes from the last checkpoint"

FAILED = 1
"""Exit code of a process that is ended by its client."""

MAX_MESSAGE_BYTES = 1 << 16
MAX_ERROR_CHARACTERS = 2000


class Address(NamedTuple):
    """Where the server listens. It heeds only those who send its token."""

    host: str
    port: int
    token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatTiming:
    """How often messages are sent, and how long each side waits.

    A process that sends nothing for `silent_s` counts as lost. Compiling takes longer, but lets the
    heartbeat thread run. `join_s` is how long the server waits for all processes from its start,
    and how long a process waits for the server. `grace_s` is the time that a process has to end by
    itself once it knows of a loss.
    """

    beat_s: float = 1.0
    silent_s: float = 30.0
    join_s: float = 300.0
    grace_s: float = 5.0


TIMING = HeartbeatTiming()


@prepared
class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of one side: who it is, its last step, how it ended ("" is success), and which
    process was lost how.

    A process has a number `host` below `num_hosts`; the server has none.
    """

    host: int | None = None
    num_hosts: int = 0
    token: str = ""
    who: str = ""
    step: int | None = None
    end: str | None = None
    lost: str | None = None
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.who} after {'no step' if self.step is None else f'step {self.step}'}"


class HeartbeatServer:
    """Watches the processes of a run, which connect to `address`; port 0 chooses a free one.

    Runs while entered.

    Raises ConfigError if the port is taken.
    """

    def __init__(self, address: Address, timing: HeartbeatTiming = TIMING) -> None:
        # One IPv6 socket takes IPv4 connections too, whichever of the two the hosts use.
        dual = address.host == "" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            self._server = socket.create_server(address[:2], family=family, dualstack_ipv6=dual)
        except OSError as error:
            raise ConfigError(
                f"can't listen on port {address.port} for heartbeats ({error}); does another"
                " training run here? End it first"
            ) from error
        self._server.settimeout(timing.beat_s)
        self.address = address._replace(port=self._server.getsockname()[1])
        self._timing = timing
        self._answer = Message()
        self._losses: list[Message] = []
        self._connections: list[socket.socket] = []
        self._hosts: dict[int, Message] = {}
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="heartbeat server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Releases all processes, and tells them of a loss if there was one."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._thread.join()
        self._server.close()
        self._decide()
        # Without an end, the clients would report this server as lost.
        self._answer = msgspec.structs.replace(self._answer, end="")
        for connection in list(self._connections):
            _send(connection, self._answer)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
                self._connections.append(connection)
                threading.Thread(
                    target=self._watch, args=[connection], name="heartbeats", daemon=True
                ).start()
                self._decide()  # connections without end must not put it off
            except TimeoutError:
                self._decide()
            except OSError:
                return

    def _watch(self, connection: socket.socket) -> None:
        """Answers the heartbeats of one process until it ends or is lost."""
        state = Message()
        connection.settimeout(self._timing.silent_s)
        with connection, connection.makefile("rb") as lines:
            while state.end is None:
                newest = _receive(lines, str(state), self._timing)
                if newest.lost is not None:
                    self._losses += [newest] if state.who else []  # else a stranger at this port
                    break
                if not secrets.compare_digest(newest.token.encode(), self.address.token.encode()):
                    break
                state = newest
                if state.host is not None:
                    self._hosts[state.host] = state
                if state.end:
                    text = f"another process of this run failed: {state}: {state.end}"
                    self._losses.append(Message(lost=text, failed=True))
                _send(connection, self._answer)
        self._connections.remove(connection)

    def _decide(self) -> None:
        """Chooses the loss to tell of."""
        if self._answer.lost is not None:
            return
        num_hosts = max(
            (state.num_hosts for state in list(self._hosts.values())), default=0
        )  # others may join meanwhile
        missing = [host for host in range(num_hosts) if host not in self._hosts]
        if self._losses:
            # A death first: the failures that it causes can arrive in the same beat.
            self._answer = min(self._losses, key=lambda loss: loss.failed)
        elif missing and time.monotonic() - self._started > self._timing.join_s:
            self._answer = Message(
                lost=(
                    f"{len(missing)} of {num_hosts} processes of this run, such as number"
                    f" {missing[0]}, did not reach port {self.address.port} of"
                    f" {socket.gethostname()} within {self._timing.join_s:.0f} s: see in their logs"
                    " whether they ended, or allow this TCP port between the hosts"
                )
            )


class HeartbeatClient:
    """The side of a process; does nothing until `start`.

    `on_loss` is called with a sentence when another process is lost, on another thread.
    """

    def __init__(self, timing: HeartbeatTiming = TIMING) -> None:
        self.timing = timing
        self._state = Message()
        self.on_loss: Callable[[str], None] = lambda text: None
        self._loss: str | None = None
        self._is_lost, self._has_left = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, address: Address, host: int, num_hosts: int) -> None:
        """Connects to the server as process `host` of `num_hosts`."""
        who = f"process {host} (pid {os.getpid()} on {socket.gethostname()})"
        self._state = msgspec.structs.replace(
            self._state, host=host, num_hosts=num_hosts, who=who, token=address.token
        )
        self._start_thread("heartbeat", lambda: self._run(address))

    def set_step(self, step: int) -> None:
        """Sets the step that this process has reached, for the report of its loss."""
        self._state = msgspec.structs.replace(self._state, step=step)

    def loss(self) -> str | None:
        """Which process was lost, if any.

        Waits for `grace_s`: a connection can break before the server notices.
        """
        if self._threads:
            self._is_lost.wait(self.timing.grace_s)
        return self._loss

    def leave(self, error: BaseException | None) -> None:
        """Tells the server how this process ends.

        From here on it depends on no other process, and no other on it.

        Calls after the first do nothing. `on_loss` is no longer called.
        """
        if self._has_left.is_set():
            return
        has_failed = error is not None and not isinstance(error, Preempted)
        end = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS] if has_failed else ""
        self._state = msgspec.structs.replace(self._state, end=end)
        self._has_left.set()
        for thread in self._threads:  # the first may append the second until it ends
            thread.join(self.timing.grace_s)

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self, address: Address) -> None:
        connection = self._connect(address)
        if connection is None:
            return
        connection.settimeout(self.timing.silent_s)
        answer = Message()
        with connection, connection.makefile("rb") as lines:
            while not self._has_left.is_set() and answer.end is None and answer.lost is None:
                _send(connection, self._state)
                answer = _receive(
                    lines,
                    f"the one that listens on port {address.port} of {address.host}",
                    self.timing,
                )
                if answer.lost is None:
                    self._has_left.wait(self.timing.beat_s)
            if answer.lost is not None:
                self._handle_loss(answer)
            _send(connection, msgspec.structs.replace(self._state, end=self._state.end or ""))
            # Once it has answered, the server knows of the end, and tells the others even if it
            # ends now.
            _receive(lines, "", self.timing)

    def _connect(self, address: Address) -> socket.socket | None:
        """A connection to the server, which may start later than this process; None if this process
        leaves first.
        """
        deadline = time.monotonic() + self.timing.join_s
        while True:
            try:
                return socket.create_connection(address[:2], timeout=self.timing.grace_s)
            except OSError as error:
                reason = error
            if self._has_left.wait(self.timing.beat_s):
                return None
            if time.monotonic() > deadline:
                self._handle_loss(Message(lost=_no_way(address, self.timing, str(reason))))
                return None

    def _handle_loss(self, loss: Message) -> None:
        """Publishes a loss, and ends this process unless it leaves within `grace_s`."""
        text = self._loss = printable(f"{loss.lost}; {AGAIN}")
        self._is_lost.set()
        # On another thread: it may write to a bucket, which must not delay the end of this process.
        self._start_thread("loss notifier", lambda: self.on_loss(text))
        if not self._has_left.wait(self.timing.grace_s):
            # Not sys.stderr, whose lock the main thread may hold.
            os.write(2, f"PeerLost: {text}\n".encode())
            os._exit(FAILED)


def find_server(published: Callable[[], Address], timing: HeartbeatTiming = TIMING) -> Address:
    """The address of a server that runs.

    What was published may be of a server that has ended, until the next one is published.

    Raises PeerLost if none answers within `join_s`.
    """
    deadline = time.monotonic() + timing.join_s
    while (reason := _silence_of(address := published(), timing)) is not None:
        if time.monotonic() > deadline:
            raise PeerLost(f"{_no_way(address, timing, reason)}; {AGAIN}")
        time.sleep(timing.beat_s)
    return address


def _silence_of(address: Address, timing: HeartbeatTiming) -> str | None:
    """Why no server of this token answers; None if one does, and has lost no process."""
    try:
        connection = socket.create_connection(address[:2], timeout=timing.grace_s)
    except OSError as error:
        return str(error)
    with connection, connection.makefile("rb") as lines:
        _send(connection, Message(token=address.token, end=""))
        return _receive(lines, "its server", timing).lost


def _no_way(address: Address, timing: HeartbeatTiming, reason: str) -> str:
    return (
        f"no way to port {address.port} of {address.host} within {timing.join_s:.0f} s ({reason}),"
        " over which the processes send heartbeats: see there whether the run ended, or allow this"
        " TCP port between the hosts"
    )


def _send(connection: socket.socket, message: Message) -> None:
    # A lost connection is noticed by `_receive`.
    with suppress(OSError):
        connection.sendall(msgspec.json.encode(message) + b"\n")


def _receive(lines: BinaryIO, who: str, timing: HeartbeatTiming) -> Message:
    """The next message of the other end, or its loss: it broke off, sent other bytes,
    or is silent.
    """
    text = f"another process of this run {{}}: {who}; {{}}"
    try:
        return msgspec.json.decode(lines.readline(MAX_MESSAGE_BYTES), type=Message)
    except TimeoutError:
        return Message(lost=text.format("hangs", f"no sign of life for {timing.silent_s:.0f} s"))
    except (OSError, *JSON_ERRORS):
        return Message(lost=text.format("died", "it was killed, or its machine is gone"))
