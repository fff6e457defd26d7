"""Starts a run: chooses the strategy, starts its processes, and connects them by heartbeats."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from shardset.errors import ConfigError
from trainer.config import Precision, Strategy, TrainConfig
from trainer.errors import PeerLost
from trainer.runtime import cuda, machine, torchtpu, xla
from trainer.runtime.base import Runtime, Single
from trainer.runtime.distributed import CudaDdp, Ddp, TpuDdp
from trainer.runtime.heartbeat import (
    AGAIN,
    PORT,
    Address,
    HeartbeatServer,
)
from trainer.runtime.preemption import relay

Worker = Callable[[Runtime, TrainConfig], None]

_OF_XLA: dict[str, type[Runtime]] = {"spmd": xla.Spmd, "replica": xla.Replica}

_RUNTIMES: dict[str, dict[str, type[Runtime]]] = {
    "single": {"cpu": Single, "cuda": cuda.Cuda, "tpu": torchtpu.TorchTpu},
    "ddp": {"cpu": Ddp, "cuda": CudaDdp, "tpu": TpuDdp},
}
"""The other strategies, by the type of the device."""


def launch(config: TrainConfig, worker: Worker) -> None:
    """Runs `worker(runtime, config)` in every process of the strategy, or in this process if one is
    enough.

    Raises ConfigError if the strategy can't run here.
    """
    for name in machine.REFUSED:
        if name in os.environ:
            raise ConfigError(
                f"{name} is set: torch_xla no longer reads it; use --precision bf16, and unset it"
            )
    strategy = choose(config.strategy)
    if strategy != "ddp" and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise ConfigError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but strategy {strategy} starts"
            " its own: each would train on all of the data; use --strategy ddp, or start it"
            " without torchrun"
        )
    if strategy == "replica":
        _launch_replicas(config, worker)
    else:
        with started(strategy, config) as runtime:
            worker(runtime, config)


def choose(strategy: Strategy) -> str:
    """The strategy of "auto": ddp where a launcher started several processes, on a TPU or by
    torchrun.

    Otherwise single on a CUDA device and on a TPU of TorchTPU, spmd with torch_xla, else single.
    """
    if strategy != "auto":
        return strategy
    if dist.is_torchelastic_launched() or torchtpu.is_launched():
        return "ddp"
    if torchtpu.is_available() or (
        torch.cuda.is_available() and os.environ.get("PJRT_DEVICE") is None
    ):
        return "single"
    return "spmd" if xla.is_installed() else "single"


@contextmanager
def started(strategy: str, config: TrainConfig) -> Iterator[Runtime]:
    """A runtime of this process, joined to the others and sending heartbeats.

    A start that takes longer than `stall_timeout_s` ends with a traceback: some back ends wait for
    the other processes for ever, in native code.
    """
    with ExitStack() as exits:
        exits.callback(faulthandler.cancel_dump_traceback_later)
        faulthandler.dump_traceback_later(
            config.stall_timeout_s, exit=True, file=sys.__stderr__ or sys.stderr
        )
        runtime = exits.enter_context(running(strategy, config.precision))
        address = runtime.heartbeat_address(exits)
        # from here on the loss of one process ends all
        exits.push(lambda kind, error, trace: runtime.heartbeat.leave(error))
        if address is not None:
            runtime.heartbeat.start(address, runtime.host, runtime.num_hosts)
        runtime.connect(config.stall_timeout_s)
        faulthandler.cancel_dump_traceback_later()
        yield runtime


@contextmanager
def running(strategy: str, precision: Precision) -> Iterator[Runtime]:
    """A runtime of this process, closed when the block ends."""
    cuda.name_user()
    torchtpu.check_machine()
    if strategy in _OF_XLA:
        xla.select_device()  # before torch_xla is imported, which reads the choice only once
        made = _OF_XLA[strategy]
    else:
        made = _RUNTIMES[strategy][device_type()]
    runtime = made(precision)
    try:
        yield runtime
    finally:
        runtime.close()


def device_type() -> str:
    """The type of the device of a process in plain PyTorch."""
    if torch.cuda.is_available():
        return "cuda"
    return torchtpu.DEVICE_TYPE if torchtpu.is_available() else "cpu"


# --- replicas -------------------------------------------------------------------------------------


def _launch_replicas(config: TrainConfig, worker: Worker) -> None:
    device = xla.select_device()
    if device == "CPU" and int(os.environ.get("CPU_NUM_DEVICES", "1")) > 1:
        raise ConfigError(
            f"strategy replica: CPU_NUM_DEVICES is {os.environ['CPU_NUM_DEVICES']}, but several"
            " replicas on the CPU wait for each other for ever; use --strategy spmd, or unset"
            " CPU_NUM_DEVICES"
        )
    workers, number = machine.tpu_workers() if device == "TPU" else ([], 0)
    if len(workers) < 2:
        workers = ["127.0.0.1"]
    with tempfile.TemporaryDirectory() as folder, watched_launcher(workers, number):
        relay(Path(folder) / "asked to stop")
        # Not an ignored SIGINT, as in the background of a script.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _kill_replicas)
        xla.spawn_replicas(run_replica, worker, config)


def run_replica(index: int, worker: Worker, config: TrainConfig) -> None:
    """One replica, in the process or thread that torch_xla started for it."""
    with started("replica", config) as runtime:
        worker(runtime, config)


@contextmanager
def watched_launcher(workers: Sequence[str], number: int) -> Iterator[None]:
    """Starts the heartbeat server on the first worker, to which the replicas of every worker
    connect. The loss of one ends all of them.
    """
    port = PORT
    with ExitStack() as exits:
        if number == 0:
            address = Address("", port) if len(workers) > 1 else Address(workers[0], 0)
            port = exits.enter_context(HeartbeatServer(address)).address.port
        os.environ[xla.HEARTBEAT_ADDRESS] = f"{workers[0]}:{port}"
        try:
            yield
        except BrokenProcessPool as error:
            raise PeerLost(f"a process of this host ended; its error is above; {AGAIN}") from error


def _kill_replicas(*_: object) -> None:
    """Handles Ctrl-C. Without it the replicas would train to the end, and this process would wait
    for them.
    """
    for child in multiprocessing.active_children():
        child.kill()
    raise KeyboardInterrupt
