"""Ends the processes of a run when one of them dies or hangs, also those that wait for it in native code for ever.

One process of a run holds the `Hub`. Each one that trains holds a `Watch`: a thread with a TCP connection to the hub,
over which both say every second that they are there. Who ends says so first, and how. A connection that closes without
that word, and a silence, are losses: the hub tells everyone who was lost, each writes it into its log, and who has not
ended a moment later is ended by its watch.
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
from types import TracebackType
from typing import Self

import msgspec

from shardset.errors import ConfigError
from trainer.errors import Preempted

PORT = 8490
"""Of the hub on the first worker of a TPU slice, beside those of libtpu (8471, and 8476 onwards)."""

BEAT_S = 1.0
SILENT_S = 30.0
"""Without a beat in this time, a process counts as lost. Compiling, which takes longer, lets other threads run."""

JOIN_S = 40.0
"""How long the hub waits for the others after the first one has come, and everyone for the hub."""

GRACE_S = 5.0
"""What a process has to end by itself once it knows that another one is lost."""

AGAIN = "the same command goes on from the last checkpoint"

DIED = "another process of this run died: {}; it was killed, or its machine is gone"
HANGS = f"another process of this run hangs: {{}}; no sign of life for {SILENT_S:.0f} s"

_FAILED = 1
_MAX_BYTES = 1 << 16
_MAX_TEXT = 2000

HostAddress = tuple[str, int]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the two sides say: who this is, a beat with the last step, how it ended ("" is well), what was lost and how.

    Who trains has a number `host`, a launcher has none.
    """

    host: int | None = None
    of: int = 0
    who: str = ""
    step: int | None = None
    end: str | None = None
    lost: str | None = None
    hangs: bool = False


class Connection:
    """One side of a connection: whole words in both directions, never waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.is_closed = False
        self._socket, self._rest, self._heard_at = connection, b"", time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether nothing came for too long; ask after `hear`, which finds what came while this process was stopped."""
        return time.monotonic() - self._heard_at > SILENT_S

    def say(self, word: Message) -> None:
        """Sends a word; whether the other side is gone is found by `hear`."""
        with suppress(OSError):
            self._socket.send(msgspec.json.encode(word) + b"\n")

    def hear(self) -> list[Message]:
        """What has come since the last time. A side that says what is no word is hung up on."""
        try:
            data = self._socket.recv(_MAX_BYTES)
            *lines, self._rest = (self._rest + data).split(b"\n")
            words = [msgspec.json.decode(line, type=Message) for line in lines]
        except BlockingIOError:
            return []
        except (OSError, msgspec.MsgspecError, RecursionError):
            self.is_closed = True
            return []
        self.is_closed = not data or len(self._rest) > _MAX_BYTES
        self._heard_at = time.monotonic()
        return words

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()


@dataclass(slots=True)
class _Member:
    """What the hub knows of one process, if it has said who it is."""

    line: Connection
    hello: Message | None = None
    step: int | None = None
    end: str | None = None

    @property
    def is_watched(self) -> bool:
        return self.hello is not None and self.end is None

    def hear(self) -> None:
        for word in self.line.hear():
            if word.who:
                self.hello = word
            self.step = self.step if word.step is None else word.step
            self.end = self.end if word.end is None else word.end

    def __str__(self) -> str:
        assert self.hello is not None
        return f"{self.hello.who} after {'no step' if self.step is None else f'step {self.step}'}"


class HeartbeatServer:
    """Where all processes of a run meet; listens on `place`, a free port if that is 0. Raises ConfigError if taken."""

    def __init__(self, place: HostAddress) -> None:
        try:
            self._server = _listening(place)
        except OSError as error:
            raise ConfigError(
                f"can't listen on port {place[1]}, by which the processes of a run watch each other ({error}); "
                "does another training run here? `python -m trainer tpu stop` ends it"
            ) from error
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._news = Message()
        self._members: list[_Member] = []
        self._expected: set[int] = set()
        self._came: set[int] = set()
        self._first_at = 0.0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)

    def __enter__(self) -> "HeartbeatServer":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Lets all go, with the news if there are any."""
        self._left.set()
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        while not self._left.wait(BEAT_S):
            self._round()
        self._round(end="")
        for member in self._members:
            member.line.close()

    def _round(self, end: str | None = None) -> None:
        with suppress(BlockingIOError):
            while True:
                self._members.append(_Member(Connection(self._server.accept()[0])))
        for member in self._members:
            member.hear()
            self._count(member.hello)
        if self._news.lost is None:
            self._news = self._found()
        for member in self._members:
            member.line.say(msgspec.structs.replace(self._news, end=end))
        self._members = [member for member in self._members if not member.line.is_closed]

    def _count(self, hello: Message | None) -> None:
        if hello is not None and hello.host is not None:
            self._first_at = self._first_at or time.monotonic()
            self._expected.update(range(hello.of))
            self._came.add(hello.host)

    def _found(self) -> Message:
        """What is wrong, if anything is."""
        failed = [f"{member}: {member.end}" for member in self._members if member.end]
        closed = [str(member) for member in self._members if member.is_watched and member.line.is_closed]
        silent = [str(member) for member in self._members if member.is_watched and member.line.is_silent]
        missing = sorted(self._expected - self._came) if time.monotonic() - self._first_at > JOIN_S else []
        # A death first: that others fail because of it may be heard at the same time.
        if closed:
            return Message(lost=DIED.format(", ".join(closed)))
        if failed:
            return Message(lost=f"another process of this run failed: {failed[0]}")
        if silent:
            return Message(lost=HANGS.format(", ".join(silent)), hangs=True)
        if missing:
            return Message(
                lost=f"{len(missing)} of {len(self._expected)} processes of this run, such as number {missing[0]}, did "
                f"not reach port {self.port} of {socket.gethostname()} within {JOIN_S:.0f} s: see in their logs "
                "whether they ended, or allow this TCP port between the hosts"
            )
        return Message()


class HeartbeatClient:
    """A process' side. Does nothing until `start`; leaving it as a context says how the process ends."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._tell: Callable[[str], None] = lambda text: None
        self._news: str | None = None
        self._end = ""
        self._lost, self._left = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._telling: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def start(self, place: HostAddress, host: int, num_hosts: int) -> None:
        """Watches from here on, as process `host` of so many, by the hub at that place."""
        who = f"process {host} (pid {os.getpid()} on {socket.gethostname()})"
        self._start(place, Message(host=host, of=num_hosts, who=who), JOIN_S)

    def reached(self, step: int) -> None:
        """Where this process stands, for the message if it is lost."""
        self._step = step

    def on_loss(self, tell: Callable[[str], None]) -> None:
        """Calls `tell` with a sentence, in a thread of its own, when another process is lost."""
        self._tell = tell

    def news(self) -> str | None:
        """Which process was lost, if that becomes known in a moment: a connection may break before the hub knows."""
        if self._thread is not None:
            self._lost.wait(GRACE_S)
        return self._news

    def leave(self, error: BaseException | None) -> None:
        """Says how this process ends, once: from here on it needs no others, and no others need it.

        What was given to `on_loss` is not called any more.
        """
        if self._left.is_set():
            return
        if error is not None and not isinstance(error, Preempted):
            self._end = f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        self._left.set()
        if self._thread is not None:
            self._thread.join(GRACE_S)
        if self._telling is not None:
            self._telling.join(GRACE_S)

    def _start(self, place: HostAddress, hello: Message, patience_s: float) -> None:
        self._thread = threading.Thread(target=self._run, args=(place, hello, patience_s), name="watch", daemon=True)
        self._thread.start()

    def _run(self, place: HostAddress, hello: Message, patience_s: float) -> None:
        line = self._connected(place, patience_s)
        if line is None:
            return
        line.say(hello)
        while not self._left.wait(BEAT_S):
            line.say(Message(step=self._step))
            words = line.hear()
            ended = any(word.end is not None for word in words)
            lost = next((word for word in words if word.lost), None)
            if lost is None and not ended:
                lost = _fault(line, f"the one that listens on port {place[1]} of {place[0]}")
            if lost is not None:
                self._go(lost)
            if lost is not None or ended:
                break
        line.say(Message(step=self._step, end=self._end))
        line.close()

    def _connected(self, place: HostAddress, patience_s: float) -> Connection | None:
        """To the hub, which may listen a little later; None if this process leaves first."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return Connection(socket.create_connection(place, timeout=GRACE_S))
            except OSError as error:
                reason = error
            if self._left.wait(BEAT_S):
                return None
            if time.monotonic() > deadline:
                text = (
                    f"no way to port {place[1]} of {place[0]} within {JOIN_S:.0f} s ({reason}), by which the processes "
                    "watch each other: see there whether the run ended, or allow this TCP port between the hosts"
                )
                self._go(Message(lost=text))
                return None

    def _know(self, lost: Message) -> None:
        self._news = f"{lost.lost}; {AGAIN}"
        self._lost.set()
        # In a thread of its own: it may write to a bucket.
        telling = threading.Thread(target=self._tell, args=(self._news,), name="last words", daemon=True)
        telling.start()
        self._telling = telling

    def _go(self, lost: Message) -> None:
        """Makes a loss known, and ends this process if it does not leave by itself in a moment."""
        self._know(lost)
        if not self._left.wait(GRACE_S):
            # Not sys.stderr: the main thread may hold its lock.
            os.write(2, f"PeerLost: {self._news}\n".encode())
            os._exit(_FAILED)


class LauncherHeartbeat(HeartbeatClient):
    """The side of a process that has started others and waits for them: torch_xla's launcher would do so for ever.

    They end by their own watches, one that failed perhaps after minutes of saving; only one that hangs can't.
    """

    def start_beside(self, place: HostAddress) -> None:
        """Watches as a process that does not train itself, and may be there long before the hub is."""
        self._start(place, Message(who=f"a launcher (pid {os.getpid()} on {socket.gethostname()})"), math.inf)

    def _go(self, lost: Message) -> None:
        self._know(lost)
        if lost.hangs and not self._left.wait(2 * GRACE_S):
            for child in multiprocessing.active_children():
                child.kill()


def _fault(line: Connection, who: str) -> Message | None:
    if line.is_closed:
        return Message(lost=DIED.format(who))
    return Message(lost=HANGS.format(who), hangs=True) if line.is_silent else None


def _listening(place: HostAddress) -> socket.socket:
    if place[0] == "" and socket.has_dualstack_ipv6():
        return socket.create_server(place, family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(place)
