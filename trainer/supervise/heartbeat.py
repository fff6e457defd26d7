"""Ends all processes of a run when one of them dies or hangs, even if they wait for it in native code.

One process of a run starts the `HeartbeatServer`. Every process that trains has a `HeartbeatClient`: a thread with a
TCP connection to the server, over which both sides send a message every second. A process that ends reports this first,
with its error. A connection that closes without a report, and silence, count as a loss. The server then tells everyone
which process was lost. Each client logs it, and ends its process if that does not end by itself within `grace_s`.
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

AGAIN = "the same command goes on from the last checkpoint"

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
    """A message of either side: who sends it, the last step, how the sender ended ("" is success), and a loss.

    A process that trains sends its number `host` below `num_hosts`; a launcher has none.
    """

    host: int | None = None
    num_hosts: int = 0
    who: str = ""
    step: int | None = None
    end: str | None = None
    lost: str | None = None
    hangs: bool = False


class Connection:
    """One end of a TCP connection that carries messages; it never blocks. Keeps the newest that the other end said.

    `hello` says who it is, `step` is its last step, `end` how it ended, and `loss` a message about a lost process.
    """

    def __init__(self, connection: socket.socket, silent_s: float) -> None:
        connection.setblocking(False)
        self.is_closed = False
        self.hello: Message | None = None
        self.step: int | None = None
        self.end: str | None = None
        self.loss: Message | None = None
        self._socket, self._silent_s = connection, silent_s
        self._unfinished_line, self._received_at = b"", time.monotonic()

    def __str__(self) -> str:
        assert self.hello is not None
        return f"{self.hello.who} after {'no step' if self.step is None else f'step {self.step}'}"

    @property
    def is_silent(self) -> bool:
        """Whether nothing came for too long. Call `receive` first, for messages that came while this process slept."""
        return time.monotonic() - self._received_at > self._silent_s

    def send(self, message: Message) -> None:
        """Sends a message. Ignores a lost connection, which `receive` reports."""
        with suppress(OSError):
            self._socket.send(msgspec.json.encode(message) + b"\n")

    def receive(self) -> None:
        """Takes the messages since the last call. Bytes that are not a message close the connection."""
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
            *lines, self._unfinished_line = (self._unfinished_line + data).split(b"\n")
            messages = [msgspec.json.decode(line, type=Message) for line in lines]
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, RecursionError):
            self.is_closed = True
            return
        # A line that long is not a heartbeat: something else has connected to this port.
        self.is_closed = not data or len(self._unfinished_line) > MAX_MESSAGE_BYTES
        self._received_at = time.monotonic()
        for message in messages:
            self.hello = message if message.who else self.hello
            self.step = self.step if message.step is None else message.step
            self.end = self.end if message.end is None else message.end
            self.loss = message if message.lost else self.loss

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


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
        self._expected: set[int] = set()
        self._joined: set[int] = set()
        self._first_joined_at = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat server", daemon=True)

    def __enter__(self) -> "HeartbeatServer":
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
            member.close()

    def _beat(self, end: str | None = None) -> None:
        # Accepts every process that has connected since the last beat; then `accept` would block.
        with suppress(BlockingIOError):
            while True:
                self._members.append(Connection(self._server.accept()[0], self._timing.silent_s))
        for member in self._members:
            member.receive()
            if member.hello is not None and member.hello.host is not None:
                self._first_joined_at = self._first_joined_at or time.monotonic()
                self._expected.update(range(member.hello.num_hosts))
                self._joined.add(member.hello.host)
        if self._loss.lost is None:
            self._loss = self._find_loss()
        for member in self._members:
            member.send(msgspec.structs.replace(self._loss, end=end))
        # Last: the search for losses above must see the closed connections.
        self._members = [member for member in self._members if not member.is_closed]

    def _find_loss(self) -> Message:
        watched = [member for member in self._members if member.hello is not None and member.end is None]
        failed = [f"{member}: {member.end}" for member in self._members if member.end]
        closed = [str(member) for member in watched if member.is_closed]
        silent = [str(member) for member in watched if member.is_silent]
        # A death first: the failures that it causes can arrive in the same beat.
        if closed:
            return _died(", ".join(closed))
        if failed:
            return Message(lost=f"another process of this run failed: {failed[0]}")
        if silent:
            return _hangs(", ".join(silent), self._timing)
        return self._find_missing()

    def _find_missing(self) -> Message:
        missing = sorted(self._expected - self._joined)
        if not missing or time.monotonic() - self._first_joined_at <= self._timing.join_s:
            return Message()
        return Message(
            lost=f"{len(missing)} of {len(self._expected)} processes of this run, such as number {missing[0]}, did "
            f"not reach port {self.port} of {socket.gethostname()} within {self._timing.join_s:.0f} s: see in their "
            "logs whether they ended, or allow this TCP port between the hosts"
        )


class HeartbeatClient:
    """The side of a process. Does nothing until `start`. Leaving the context tells the server how the process ends."""

    def __init__(self, timing: HeartbeatTiming = TIMING) -> None:
        self.timing = timing
        self._step: int | None = None
        self._on_loss: Callable[[str], None] = lambda text: None
        self._loss: str | None = None
        self._end = ""
        self._is_lost, self._has_left = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._notifier: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.leave(error)

    def start(self, address: Address, host: int, num_hosts: int) -> None:
        """Connects to the server as process `host` of `num_hosts`."""
        hello = Message(host=host, num_hosts=num_hosts, who=f"process {host} {_where()}")
        self._start(address, hello, self.timing.join_s)

    def set_step(self, step: int) -> None:
        """Sets the step that this process has reached, for the report of its loss."""
        self._step = step

    def on_loss(self, notify: Callable[[str], None]) -> None:
        """Registers `notify`, which is called with a sentence when another process is lost, on a thread of its own."""
        self._on_loss = notify

    def loss(self) -> str | None:
        """Which process was lost, if any. Waits for `grace_s`: a connection can break before the server notices."""
        if self._thread is not None:
            self._is_lost.wait(self.timing.grace_s)
        return self._loss

    def leave(self, error: BaseException | None) -> None:
        """Tells the server how this process ends. From here on it depends on no other process, and no other on it.

        Calls after the first do nothing. The function given to `on_loss` is no longer called.
        """
        if self._has_left.is_set():
            return
        if error is not None and not isinstance(error, Preempted):
            self._end = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        self._has_left.set()
        if self._thread is not None:
            self._thread.join(self.timing.grace_s)
        # After the first thread, which may have started this one just now.
        if self._notifier is not None:
            self._notifier.join(self.timing.grace_s)

    def _start(self, address: Address, hello: Message, timeout_s: float) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(address, hello, timeout_s), name="heartbeat", daemon=True
        )
        self._thread.start()

    def _run(self, address: Address, hello: Message, timeout_s: float) -> None:
        connection = self._connect(address, timeout_s)
        if connection is None:
            return
        connection.send(hello)
        while connection.end is None and not self._has_left.wait(self.timing.beat_s):
            connection.send(Message(step=self._step))
            connection.receive()
            if (loss := connection.loss or self._server_loss(connection, address)) is not None:
                self._handle_loss(loss)
                break
        connection.send(Message(step=self._step, end=self._end))
        connection.close()

    def _connect(self, address: Address, timeout_s: float) -> Connection | None:
        """A connection to the server, which may start later than this process; None if this process leaves first."""
        deadline = time.monotonic() + timeout_s
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

    def _server_loss(self, connection: Connection, address: Address) -> Message | None:
        who = f"the one that listens on port {address[1]} of {address[0]}"
        if connection.end is not None:  # a server that has said goodbye is not a loss
            return None
        if connection.is_closed:
            return _died(who)
        return _hangs(who, self.timing) if connection.is_silent else None

    def _publish(self, loss: Message) -> None:
        self._loss = f"{loss.lost}; {AGAIN}"
        self._is_lost.set()
        # On a thread of its own: it may write to a bucket, which must not delay the end of this process.
        notifier = threading.Thread(target=self._on_loss, args=(self._loss,), name="loss notifier", daemon=True)
        notifier.start()
        # Set once it runs: `leave` joins it, and may do so at any moment.
        self._notifier = notifier

    def _handle_loss(self, loss: Message) -> None:
        """Publishes a loss, and ends this process unless it leaves by itself within `grace_s`."""
        self._publish(loss)
        if not self._has_left.wait(self.timing.grace_s):
            # Not sys.stderr, whose lock the main thread may hold.
            os.write(2, f"PeerLost: {self._loss}\n".encode())
            os._exit(FAILED)


class LauncherHeartbeat(HeartbeatClient):
    """The client of a process that started replicas and waits for them, which torch_xla would do for ever.

    Replicas are ended by their own clients, some after minutes of saving. This one kills those that hang.
    """

    def start_as_launcher(self, address: Address) -> None:
        """Connects as a process that does not train. It may start long before the server."""
        self._start(address, Message(who=f"a launcher {_where()}"), math.inf)

    def _handle_loss(self, loss: Message) -> None:
        self._publish(loss)
        if loss.hangs and not self._has_left.wait(2 * self.timing.grace_s):
            for child in multiprocessing.active_children():
                child.kill()


def _where() -> str:
    return f"(pid {os.getpid()} on {socket.gethostname()})"


def _died(who: str) -> Message:
    return Message(lost=f"another process of this run died: {who}; it was killed, or its machine is gone")


def _hangs(who: str, timing: HeartbeatTiming) -> Message:
    text = f"another process of this run hangs: {who}; no sign of life for {timing.silent_s:.0f} s"
    return Message(lost=text, hangs=True)


def _listen(address: Address) -> socket.socket:
    # One IPv6 socket takes IPv4 connections too, whichever of the two the hosts use.
    if address[0] == "" and socket.has_dualstack_ipv6():
        return socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(address)
