"""Runs on a TPU VM with TorchTPU: starts the trainer once for each chip, and passes on its exit
code.

    python -m trainer.tpu.processes ARGUMENTS    run `shardset train ARGUMENTS` in one
    process for each chip

torchrun starts such processes too, but turns their exit codes into its own. These say whether a run
is done (0), or saved and to be continued (3).
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from shardset.errors import ConfigError
from shardset.program import run_program, run_verb
from trainer.runtime import machine, torchtpu

RELAYED = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str]) -> int:
    """Trains in one process for each chip of this machine. Returns the exit code."""
    environment = launch_environment(*machine.tpu_workers())
    command = [sys.executable, "-m", "trainer", "train", *arguments]
    return run(command, environments_of(environment, torchtpu.num_local_processes(environment)))


def launch_environment(workers: Sequence[str], number: int) -> dict[str, str]:
    """The environment that all processes of this machine share, where it is number `number` of a
    slice's workers.

    Raises ConfigError where TorchTPU can't tell how the chips are wired.
    """
    if len(workers) > 1:
        if torchtpu.TOPOLOGY not in os.environ:
            raise ConfigError(
                f"this slice has {len(workers)} machines, and TorchTPU sees its own machine's chips"
                " only: give the wiring of the whole slice, such as --env"
                f" {torchtpu.TOPOLOGY}=2,2,4 for `tpu train`"
            )
        # GKE sets these two, TPU VMs do not.
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", ",".join(workers))
        os.environ.setdefault("JOB_COMPLETION_INDEX", str(number))
    torchtpu.set_launch_environment()
    return dict(os.environ)


def environments_of(base: Mapping[str, str], num_local: int) -> list[dict[str, str]]:
    """The environment of each process of this machine: its numbers as torch.distributed reads them.

    `base` has NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT where several machines train together.
    """
    num_nodes, node = int(base.get("NNODES", "1")), int(base.get("NODE_RANK", "0"))
    shared = {"MASTER_ADDR": "127.0.0.1", **base}
    if "MASTER_PORT" not in base:
        with socket.create_server(("127.0.0.1", 0)) as free:
            shared["MASTER_PORT"] = str(free.getsockname()[1])
    numbers = {
        "WORLD_SIZE": str(num_nodes * num_local),
        "LOCAL_WORLD_SIZE": str(num_local),
        "GROUP_RANK": str(node),
    }
    return [
        {**shared, **numbers, "RANK": str(node * num_local + local), "LOCAL_RANK": str(local)}
        for local in range(num_local)
    ]


def run(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Runs the command once in each environment; returns 0, or the exit code of a process that
    failed, the one of the lowest number.

    SIGTERM and SIGINT go to all of them. A process that ends early is for the others to notice, as
    in any run.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def relay(number: int, _: object) -> None:
        for process in processes:
            process.send_signal(number)

    for number in RELAYED:
        signal.signal(number, relay)
    for environment in environments:
        processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    code = next(filter(None, codes), 0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    run_program(
        lambda: run_verb(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv),
        "trainer,torchtpu",
    )
