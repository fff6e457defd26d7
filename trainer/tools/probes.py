"""Measures the machine and the network for `shardset doctor`, which judges the answers.

python -m trainer.tools.probes STRATEGY    print the devices of a run as JSON, in a process that can
be killed
"""

import importlib.metadata
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from shardset.errors import StorageError
from shardset.storage.open import is_address, open_storage
from trainer.config import TrainConfig
from trainer.runtime import machine

DISTRIBUTIONS = ("torch", "torchvision", "torch_xla", "torch_tpu", "libtpu")

DEVICES_TIMEOUT_S = 180.0
CONNECT_TIMEOUT_S = 3.0
BUCKET_TIMEOUT_S = 10.0
RATE_BATCH = 64
RATE_S = 1.0

PortState = Literal["open", "closed", "filtered"]
"""A process accepts the connection; the machine refuses it; nothing answers."""


class Devices(NamedTuple):
    """The devices of a run; `kind` is CPU, CUDA or TPU."""

    strategy: str
    kind: str
    num_hosts: int
    num_devices: int


def versions() -> dict[str, str | None]:
    """The installed versions; None for what is not installed."""
    return {
        name: next(
            (package.version for package in importlib.metadata.distributions(name=name)), None
        )
        for name in DISTRIBUTIONS
    }


def devices(strategy: str, timeout_s: float = DEVICES_TIMEOUT_S) -> Devices | str:
    """The devices of a run with this strategy, or why they are unknown.

    Asks in a separate process: a slice waits until all its hosts ask, and a process that has asked
    keeps the TPU.
    """
    command = [sys.executable, "-m", "trainer.tools.probes", strategy]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"the devices did not come up within {timeout_s:.0f} s"
    lines = result.stdout.strip().splitlines()
    if result.returncode or not lines:
        return (result.stderr.strip().splitlines() or [f"ended with code {result.returncode}"])[-1]
    return Devices(*json.loads(lines[-1]))


def local_devices(strategy: str) -> Devices:
    """The devices of this process. Starts the runtime, and with it the TPU."""
    from trainer.runtime import launch

    chosen = launch.choose(strategy)  # type: ignore[arg-type]
    # `replica` starts processes; `spmd` sees the same devices in this one.
    with launch.running("spmd" if chosen == "replica" else chosen, "fp32") as running:
        running.connect(DEVICES_TIMEOUT_S)
        kind = running.device.type
        kind = os.environ["PJRT_DEVICE"] if kind == "xla" else kind.upper()
        return Devices(chosen, kind, running.num_hosts, running.num_devices)


def zone() -> str | None:
    """The zone of this machine: us-central2-b."""
    return (machine.metadata("zone") or "").rpartition("/")[2] or None


def bucket_location(bucket: str, timeout_s: float = BUCKET_TIMEOUT_S) -> str | StorageError:
    """The location of a bucket, or the error instead of it, within `timeout_s`."""
    from shardset.storage.gcs import GcsStorage
    from shardset.storage.retry import RetryPolicy

    try:
        return GcsStorage(bucket, retry=RetryPolicy(deadline_s=timeout_s)).location()
    except StorageError as error:
        return error


def try_writing(url: str) -> None:
    """Writes a file to a run folder, reads it back and deletes it.

    Raises StorageError. Leaves nothing behind.
    """
    if is_address(url):
        folder = url
    else:  # only a run creates the folder
        path = Path(url).absolute()
        folder = str(next(each for each in (path, *path.parents) if each.exists()))
    name, storage = f"doctor-{uuid.uuid4().hex}", open_storage(folder)
    storage.write(name, b"doctor")
    storage.read(name)
    storage.delete(name)


def ports(
    hosts: Iterable[str], numbers: Iterable[int], timeout_s: float = CONNECT_TIMEOUT_S
) -> dict[str, PortState]:
    """The state of every port of every host, by `host:port`. Tries all of them at once."""

    def state(address: tuple[str, int]) -> PortState:
        try:
            socket.create_connection(address, timeout=timeout_s).close()
        except ConnectionRefusedError:
            return "closed"
        except OSError:  # no answer in time, no route, an unknown name
            return "filtered"
        return "open"

    addresses = list(itertools.product(hosts, numbers))
    with ThreadPoolExecutor(64) as pool:
        names = (f"{host}:{port}" for host, port in addresses)
        return dict(zip(names, pool.map(state, addresses), strict=True))


def decode_rate(config: TrainConfig) -> float:
    """Training images per second that this host reads and decodes after the first batch.

    Raises ShardsetError.
    """
    from trainer.data.splits import open_data

    image = replace(config.image, augment_repeats=1)
    stream = open_data(
        replace(config, global_batch_size=RATE_BATCH, accumulate=1, image=image), 0, 1
    ).train
    batches = stream.run((epoch, range(len(stream))) for epoch in itertools.count())
    next(batches)  # waits for indexes and connections, so it does not count
    start, num_images, seconds = time.perf_counter(), 0, 0.0
    while seconds < RATE_S:
        _, _, batch = next(batches)
        num_images += int((batch["weight"] > 0).sum())
        seconds = time.perf_counter() - start
    return num_images / seconds


if __name__ == "__main__":
    print(json.dumps(local_devices(sys.argv[1])))
