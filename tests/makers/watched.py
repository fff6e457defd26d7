"""One process of a run that only watches: `python -m tests.makers.watched PORT HOST NUM_HOSTS
WHAT`.

Host 0 holds the server. WHAT it does, once a line comes on stdin: `wait` in native code for ever
(`wait alone` if nobody else will come), `end` well at once or `later`, `fail`, be `preempted`, or
`give up` as soon as it hears of a loss. Who waits is ended soon after a loss, so that tests are
short; who ends by itself has all the time that it takes on a busy machine.
"""

import ctypes
import sys
import time
from contextlib import ExitStack

from trainer.errors import NotFinite, PeerLost, Preempted
from trainer.runtime import heartbeat

BEAT_S, GRACE_S, LATER_S = 0.2, 2.0, 4.0
JOIN_S, ALONE_S = 600.0, 3.0
CAUGHT = 7
"""The exit code of a main thread that ends by itself after a loss."""


def main(port: int, host: int, num_hosts: int, what: str) -> None:
    """Says `ready` when it stands where it will act; the one with the server when all have come and
    said their step.
    """
    timing = heartbeat.HeartbeatTiming(
        beat_s=BEAT_S,
        grace_s=GRACE_S if what.startswith("wait") else JOIN_S,
        join_s=ALONE_S if what == "wait alone" else JOIN_S,
    )
    own, address = heartbeat.HeartbeatClient(timing), heartbeat.Address("127.0.0.1", port, "secret")
    with ExitStack() as exits:
        server = (
            exits.enter_context(heartbeat.HeartbeatServer(address, timing)) if host == 0 else None
        )
        own.on_loss = lambda text: print(f"noted: {text}", flush=True)
        own.set_step(10 + host)
        own.start(address, host, num_hosts)
        exits.push(lambda kind, error, trace: own.leave(error))
        while what != "wait alone" and server is not None and _num_heard(server) < num_hosts:
            time.sleep(BEAT_S)
        print("ready", flush=True)
        if what != "wait alone":
            sys.stdin.readline()
        act(what, own)


def _num_heard(server: heartbeat.HeartbeatServer) -> int:
    return sum(state.step is not None for state in server._hosts.values())


def act(what: str, own: heartbeat.HeartbeatClient) -> None:
    """What a main thread may be at when another process is lost."""
    match what:
        case "wait" | "wait alone":
            ctypes.CDLL(None).sleep(600)
        case "later":
            time.sleep(LATER_S)
        case "fail":
            raise NotFinite("the loss is nan")
        case "preempted":
            raise Preempted("asked to stop")
        case "give up":
            while own._loss is None:
                time.sleep(0.05)
            raise PeerLost(own.loss())
        case _:
            assert what == "end"


if __name__ == "__main__":
    try:
        port, host, num_hosts = map(int, sys.argv[1:4])
        main(port, host, num_hosts, sys.argv[4])
    except PeerLost:
        sys.exit(CAUGHT)
    except Preempted:
        sys.exit(3)
