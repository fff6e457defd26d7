"""One host of a slice that trains under spmd together with the others: all is real but the devices
of other hosts.

Run as a script: `python -m tests.makers.pod HOST HOSTS DEVICES PORT EXCHANGE HOME STOP
CONFIG_JSON`. A run folder that is relative is below HOME. The host gets a SIGTERM once it has sent
the rows STOP, such as 1-36: thread 1, call 36.

XLA:CPU can't join processes to one world: torch_xla contains no collectives between processes of a
CPU. So each process has all devices of the slice, of which it is told that `DEVICES` are its own.
On a slice, the rows that a host sends go to its own devices, and those of others hold the others'
rows. Here the rows of all hosts meet on their way to the devices, in files below `EXCHANGE`. The
graph is then that of the slice, and each host computes all of it.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from shardset.program import PREEMPTED
from trainer.errors import Preempted

POLL_S = 0.01


class Exchange:
    """The rows of all hosts, in the order of the hosts.

    What a thread of one host sends meets that of the others.
    """

    def __init__(self, folder: Path, host: int, num_hosts: int, stop: str) -> None:
        self._folder, self._host, self._num_hosts, self._stop = folder, host, num_hosts, stop
        self._threads = itertools.count()
        self._local = threading.local()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if not hasattr(self._local, "thread"):
            # All hosts start their threads in the same order, each of which waits for the others at
            # its first batch.
            self._local.thread, self._local.calls = next(self._threads), itertools.count()
        name = f"{self._local.thread}-{next(self._local.calls)}"
        temporary = self._folder / f".{name}-{self._host}.npy"
        np.save(temporary, rows.numpy())
        temporary.rename(self._folder / f"{name}-{self._host}.npy")
        if name == self._stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.cat([self._rows(f"{name}-{host}.npy") for host in range(self._num_hosts)])

    def _rows(self, name: str) -> torch.Tensor:
        # the heartbeat ends this process if the other one is lost
        while not (self._folder / name).exists():
            time.sleep(POLL_S)
        return torch.from_numpy(np.load(self._folder / name))


def main(
    host: int,
    num_hosts: int,
    devices: int,
    port: int,
    exchange: Exchange,
    home: Path,
    config_json: str,
) -> None:
    """Trains one run with the other hosts."""
    os.chdir(home)
    os.environ.update(
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES=str(num_hosts * devices),
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES=",".join(["127.0.0.1"] * num_hosts),
        TPU_WORKER_ID=str(host),
    )
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    xr.process_index, xr.process_count = lambda: host, lambda: num_hosts
    xr.addressable_runtime_device_count = lambda: devices
    send = xm.send_cpu_data_to_device

    def send_with_others(tensors, device, input_sharding=None):
        if input_sharding is not None:
            assert input_sharding.minibatch
            assert all(len(tensor) % devices == 0 for tensor in tensors)
            tensors = [exchange(tensor) for tensor in tensors]
        return send(tensors, device, input_sharding)

    xm.send_cpu_data_to_device = send_with_others
    from trainer import config as configs
    from trainer import loop
    from trainer.runtime import launch, xla

    xla.Spmd.heartbeat_port = port
    launch.launch(configs.from_dict(json.loads(config_json)), loop.train)


if __name__ == "__main__":
    number, hosts, own, free_port = map(int, sys.argv[1:5])
    rows = Exchange(Path(sys.argv[5]), number, hosts, sys.argv[7])
    try:
        main(number, hosts, own, free_port, rows, Path(sys.argv[6]), sys.argv[8])
    except Preempted:
        sys.exit(PREEMPTED)
