"""Ends all processes of a run when one of them dies or hangs, even if they wait for it in native code.

One process of a run starts the `HeartbeatServer`. Every process that trains has a `HeartbeatClient`: a thread with a
TCP connection to the server, over which both sides send their state every second. A process that ends reports this
first, with its error. A connection that closes without a report, and silence, count as a loss. The server then tells
everyone which process was lost. Each client logs it, and ends its process if that does not end within `grace_s`.
"""

import math
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import msgspec

from shardset.errors import ConfigError
from shardset.prepared import prepared
from trainer.errors import Preempted

PORT = 8490
"""Port of the server on the first worker of a TPU slice, beside those of libtpu (8471, and 8476 onwards)."""

AGAIN = "the same command resumes from the last checkpoint"

FAILED = 1
"""Exit code of a process that is ended by its client."""

MAX_MESSAGE_BYTES = 1 << 16
MAX_ERROR_CHARACTERS = 2000

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatTiming:
    """How often messages are sent, and how long each side waits.

    A process that sends nothing for `silent_s` counts as lost. Compiling takes longer, but lets the heartbeat thread
    run. `join_s` is how long the server waits for all processes once the first has connected, and how long a process
    waits for the server. `grace_s` is the time that a process has to end by itself once it knows of a loss.
    """

    beat_s: float = 1.0
    silent_s: float = 30.0
    join_s: float = 300.0
    grace_s: float = 5.0


TIMING = HeartbeatTiming()


@prepared
class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of one side: who it is, its last step, how it ended ("" is success), and which process was lost.

    A process that trains has a number `host` below `num_hosts`; a launcher has none.
    """

    host: int | None = None
    num_hosts: int = 0
    who: str = ""
    step: int | None = None
    end: str | None = None
    lost: str | None = None
    hangs: bool = False

    def __str__(self) -> str:
        return f"{self.who} after {'no step' if self.step is None else f'step {self.step}'}"


class Connection:
    """One end of a TCP connection, which never blocks; `newest` is the last message of the other end."""

    def __init__(self, connection: socket.socket, silent_s: float) -> None:
        connection.setblocking(False)
        self.is_closed, self.newest = False, Message()
        self.socket, self._silent_s = connection, silent_s
        self._unfinished_line, self._received_at = b"", time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether nothing came for too long. Call `receive` first, for messages that came while this process slept."""
        return time.monotonic() - self._received_at > self._silent_s

    def send(self, message: Message) -> None:
        """Sends a message. Ignores a lost connection, which `receive` reports."""
        with suppress(OSError):
            self.socket.send(msgspec.json.encode(message) + b"\n")

    def receive(self) -> None:
        """Takes the messages since the last call. Bytes that are not a message close the connection."""
        try:
            data = self.socket.recv(MAX_MESSAGE_BYTES)
            *lines, self._unfinished_line = (self._unfinished_line + data).split(b"\n")
            for line in lines:
                self.newest = msgspec.json.decode(line, type=Message)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, RecursionError):
            self.is_closed = True
            return
        # A line that long is not a heartbeat: something else has connected to this port.
        self.is_closed = not data or len(self._unfinished_line) > MAX_MESSAGE_BYTES
        self._received_at = time.monotonic()

    def loss(self, who: str) -> Message:
        """The loss that the other end tells of, or how itself was lost: it broke off, or has been silent."""
        if self.newest.lost:
            return self.newest
        text = f"another process of this run {{}}: {who}; {{}}"
        if self.newest.end is None and self.is_closed:
            return Message(lost=text.format("died", "it was killed, or its machine is gone"))
        if self.newest.end is None and self.is_silent:
            return Message(lost=text.format("hangs", f"no sign of life for {self._silent_s:.0f} s"), hangs=True)
        return Message()


class HeartbeatServer:
    """Watches the processes of a run, which connect to `address`; port 0 chooses a free one. Runs while entered.

    Raises ConfigError if the port is taken.
    """

    def __init__(self, address: Address, timing: HeartbeatTiming = TIMING) -> None:
        try:
            self._server = _listen(address)
        except OSError as error:
            raise ConfigError(
                f"can't listen on port {address[1]} for heartbeats ({error}); does another training run here? "
                "`python -m trainer tpu stop` ends it"
            ) from error
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._timing = timing
        self._loss = Message()
        self._members: list[Connection] = []
        self._num_hosts, self._joined, self._first_joined_at = 0, set[int](), 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Releases all processes, and tells them of a loss if there was one."""
        self._stopped.set()
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        while not self._stopped.wait(self._timing.beat_s):
            self._beat()
        # Releases the clients, which would otherwise report this server as lost.
        self._beat(end="")
        for member in self._members:
            member.socket.close()

    def _beat(self, end: str | None = None) -> None:
        # Accepts every process that has connected since the last beat; then `accept` would block.
        with suppress(BlockingIOError):
            while True:
                self._members.append(Connection(self._server.accept()[0], self._timing.silent_s))
        for member in self._members:
            member.receive()
            if member.newest.host is not None:
                self._first_joined_at = self._first_joined_at or time.monotonic()
                self._num_hosts = max(self._num_hosts, member.newest.num_hosts)
                self._joined.add(member.newest.host)
        if self._loss.lost is None:
            self._loss = self._find_loss()
        for member in self._members:
            member.send(msgspec.structs.replace(self._loss, end=end))
        # Last: the search for losses above must see the closed connections.
        self._members = [member for member in self._members if not member.is_closed]

    def _find_loss(self) -> Message:
        known = [member for member in self._members if member.newest.who]
        lost = [loss for member in known if (loss := member.loss(str(member.newest))).lost]
        ends = [f"{member.newest}: {member.newest.end}" for member in known if member.newest.end]
        failed = [Message(lost=f"another process of this run failed: {end}") for end in ends]
        # A death first: the failures that it causes can arrive in the same beat.
        if found := [*(loss for loss in lost if not loss.hangs), *failed, *lost]:
            return found[0]
        missing = [host for host in range(self._num_hosts) if host not in self._joined]
        if not missing or time.monotonic() - self._first_joined_at <= self._timing.join_s:
            return Message()
        return Message(
            lost=f"{len(missing)} of {self._num_hosts} processes of this run, such as number {missing[0]}, did "
            f"not reach port {self.port} of {socket.gethostname()} within {self._timing.join_s:.0f} s: see in their "
            "logs whether they ended, or allow this TCP port between the hosts"
        )


class HeartbeatClient:
    """The side of a process; does nothing until `start`. Leaving the context tells the server how the process ends."""

    def __init__(self, timing: HeartbeatTiming = TIMING) -> None:
        self.timing = timing
        self._state = Message()
        self._on_loss: Callable[[str], None] = lambda text: None
        self._loss: str | None = None
        self._is_lost, self._has_left = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.leave(error)

    def start(self, address: Address, host: int | None = None, num_hosts: int = 0) -> None:
        """Connects to the server as process `host` of `num_hosts`.

        Without a number as a launcher, which waits for its replicas. It may start long before the server. Replicas are
        ended by their own clients, some after minutes of saving; the launcher's client kills those that hang.
        """
        who = f"{'a launcher' if host is None else f'process {host}'} (pid {os.getpid()} on {socket.gethostname()})"
        self._state = msgspec.structs.replace(self._state, host=host, num_hosts=num_hosts, who=who)
        self._start_thread("heartbeat", lambda: self._run(address))

    def set_step(self, step: int) -> None:
        """Sets the step that this process has reached, for the report of its loss."""
        self._state = msgspec.structs.replace(self._state, step=step)

    def on_loss(self, notify: Callable[[str], None]) -> None:
        """Registers `notify`, which is called with a sentence when another process is lost, on another thread."""
        self._on_loss = notify

    def loss(self) -> str | None:
        """Which process was lost, if any. Waits for `grace_s`: a connection can break before the server notices."""
        if self._threads:
            self._is_lost.wait(self.timing.grace_s)
        return self._loss

    def leave(self, error: BaseException | None) -> None:
        """Tells the server how this process ends. From here on it depends on no other process, and no other on it.

        Calls after the first do nothing. The function given to `on_loss` is no longer called.
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
        while connection.newest.end is None:
            connection.send(self._state)
            connection.receive()
            loss = connection.loss(f"the one that listens on port {address[1]} of {address[0]}")
            if loss.lost is not None:
                self._handle_loss(loss)
                break
            if self._has_left.wait(self.timing.beat_s):
                break
        connection.send(msgspec.structs.replace(self._state, end=self._state.end or ""))
        connection.socket.close()

    def _connect(self, address: Address) -> Connection | None:
        """A connection to the server, which may start later than this process; None if this process leaves first."""
        deadline = math.inf if self._state.host is None else time.monotonic() + self.timing.join_s
        while True:
            try:
                return Connection(socket.create_connection(address, timeout=self.timing.grace_s), self.timing.silent_s)
            except OSError as error:
                reason = error
            if self._has_left.wait(self.timing.beat_s):
                return None
            if time.monotonic() > deadline:
                text = (
                    f"no way to port {address[1]} of {address[0]} within {self.timing.join_s:.0f} s ({reason}), over "
                    "which the processes send heartbeats: see there whether the run ended, or allow this TCP port "
                    "between the hosts"
                )
                self._handle_loss(Message(lost=text))
                return None

    def _handle_loss(self, loss: Message) -> None:
        """Publishes a loss, and ends this process, or the children of a launcher, unless it leaves within `grace_s`."""
        text = self._loss = f"{loss.lost}; {AGAIN}"
        self._is_lost.set()
        # On another thread: it may write to a bucket, which must not delay the end of this process.
        self._start_thread("loss notifier", lambda: self._on_loss(text))
        if self._state.host is not None and not self._has_left.wait(self.timing.grace_s):
            # Not sys.stderr, whose lock the main thread may hold.
            os.write(2, f"PeerLost: {text}\n".encode())
            os._exit(FAILED)
        if self._state.host is None and loss.hangs and not self._has_left.wait(2 * self.timing.grace_s):
            for child in multiprocessing.active_children():
                child.kill()


def _listen(address: Address) -> socket.socket:
    # One IPv6 socket takes IPv4 connections too, whichever of the two the hosts use.
    if address[0] == "" and socket.has_dualstack_ipv6():
        return socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(address)
