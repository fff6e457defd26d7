"""Measures the machine and the network for `python -m trainer doctor`; `checks` judges the numbers.

python -m trainer.tools.probes devices STRATEGY    print the devices of a run as JSON, in a process that can be killed
"""

import email.utils
import importlib.metadata
import itertools
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardset.addresses import without_user
from shardset.errors import NotFound, ShardsetError, StorageError
from shardset.storage.open import is_address, open_storage
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.record.log_files import METRICS, records

DISTRIBUTIONS = ("torch", "torchvision", "torch_xla", "torch_tpu", "libtpu")
STORAGE_API = "https://storage.googleapis.com"
METADATA_SERVER = "169.254.169.254"

DEVICES_TIMEOUT_S = 180.0
METADATA_TIMEOUT_S = 1.0
CONNECT_TIMEOUT_S = 3.0
BUCKET_TIMEOUT_S = 10.0
RATE_BATCH = 64
RATE_S = 1.0

PortState = Literal["open", "closed", "filtered"]
"""A process accepts the connection; the machine refuses it; nothing answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a run: `kind` as torch names it, `platform` as PJRT_DEVICE does; None without torch_xla."""

    strategy: str
    kind: str
    platform: str | None
    num_hosts: int
    num_devices: int
    on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run as its folder records it: the configuration, and its records (`trainer.record.metrics`) in order."""

    config: TrainConfig
    records: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Images a second that this host reads and decodes, and the number of images measured."""

    images_per_second: float
    num_images: int


def versions() -> dict[str, str | None]:
    """The installed versions; None for what is not installed."""
    return {name: _version(name) for name in DISTRIBUTIONS}


def pins() -> dict[str, str]:
    """The versions that the installed torch_xla requires, such as `libtpu==0.0.21`."""
    try:
        requirements = importlib.metadata.requires("torch_xla") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {pin[1]: pin[2] for text in requirements if (pin := re.match(r"(\w+)==([\w.]+)", text))}


def devices(strategy: str, timeout_s: float = DEVICES_TIMEOUT_S) -> Devices | str:
    """The devices of a run with this strategy, or why they are unknown.

    Asks in a separate process: a slice waits until all its hosts ask, and a process that has asked keeps the TPU.
    """
    command = [sys.executable, "-m", "trainer.tools.probes", "devices", strategy]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"the devices did not come up within {timeout_s:.0f} s"
    lines = result.stdout.strip().splitlines()
    if result.returncode or not lines:
        return (result.stderr.strip().splitlines() or [f"ended with code {result.returncode}"])[-1]
    return Devices(**json.loads(lines[-1]))


def local_devices(strategy: str) -> Devices:
    """The devices of this process. Starts the runtime, and with it the TPU."""
    from trainer.runtime import launch

    chosen = launch.choose(strategy)  # type: ignore[arg-type]
    # `replica` starts processes of its own; `spmd` sees the same devices in this one.
    with launch.running("spmd" if chosen == "replica" else chosen, "fp32") as running:
        running.join(DEVICES_TIMEOUT_S)
        return Devices(
            strategy=chosen,
            kind=running.device.type,
            platform=running.platform,
            num_hosts=running.num_hosts,
            num_devices=running.num_devices,
            on_host=running.on_host,
        )


def metadata(path: str) -> str | None:
    """An answer of the metadata server of Compute Engine; None without a server, or without anything at that path."""
    host = os.environ.get("GCE_METADATA_HOST", METADATA_SERVER)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{path}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_S) as response:
            # Other clouds have a server at this address too, but it does not send this header.
            return response.read().decode() if response.headers.get("Metadata-Flavor") == "Google" else None
    except OSError:
        return None


def zone() -> str | None:
    """The zone of this machine: us-central2-b."""
    text = metadata("zone")
    return None if text is None else text.rpartition("/")[2]


def workers() -> list[str]:
    """The addresses of all workers of this TPU slice in order; empty elsewhere."""
    text = metadata("attributes/worker-network-endpoints") or ""
    fields = (endpoint.split(":") for endpoint in text.split(","))
    return [each[2] for each in fields if len(each) > 2]


def bucket_location(bucket: str, timeout_s: float = BUCKET_TIMEOUT_S) -> str | StorageError:
    """The location of a bucket, or the error instead of it, within `timeout_s`."""
    from shardset.storage import gcs
    from shardset.storage.retry import RetryPolicy

    try:
        return gcs.bucket_location(bucket, RetryPolicy(deadline_s=timeout_s))
    except StorageError as error:
        return error


def clock_skew_s() -> float | None:
    """Seconds that this machine's clock is ahead of Cloud Storage's; None without an answer."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    url = without_user(emulator if "://" in emulator else f"http://{emulator}") if emulator else STORAGE_API
    before = time.time()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_TIMEOUT_S) as response:
            date = response.headers.get("Date")
    except urllib.error.HTTPError as error:  # refusals carry a date too
        date = error.headers.get("Date")
    except OSError:
        return None
    # The header holds whole seconds, so the true time is half a second later on average.
    return None if date is None else before - email.utils.parsedate_to_datetime(date).timestamp() - 0.5


def write_error(url: str) -> str | None:
    """Why a file can't be written, read back and deleted in a run folder; None if it can. Leaves nothing behind."""
    folder = url if is_address(url) else str(nearest_folder(Path(url)))
    name, data = f"doctor-{uuid.uuid4().hex}", b"doctor"
    try:
        storage = open_storage(folder)
        with storage.writer(name) as writer:
            writer.write(data)
        try:
            read = storage.read(name)
        finally:
            storage.delete(name)
    except ShardsetError as error:
        return str(error)
    return None if read == data else f"{folder}/{name}: {len(read)} other bytes came back"


def recorded_run(url: str) -> RecordedRun | None:
    """The run in a folder; None if there is none. Raises StorageError, or ConfigError for a damaged record."""
    folder = open_storage(url)
    try:
        config = configs.recorded(folder)
    except NotFound:
        return None
    try:
        lines = folder.read(METRICS)
    except NotFound:
        lines = b""
    return RecordedRun(config=config, records=records(lines))


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def free_bytes(path: str) -> int:
    """Free space on the disk that a path is on, or would be."""
    return shutil.disk_usage(nearest_folder(Path(path))).free


def used_bytes(path: str) -> int:
    """The size of all files in a folder; 0 if it does not exist."""
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def open_file_limit() -> int:
    """The number of files that this process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def ports(hosts: Iterable[str], numbers: Iterable[int], timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, PortState]:
    """The state of every port of every host, by `host:port`. Tries all of them at once."""
    pairs = list(itertools.product(hosts, numbers))
    with ThreadPoolExecutor(max(1, min(64, len(pairs)))) as pool:
        states = pool.map(lambda pair: _port(pair[0], pair[1], timeout_s), pairs)
        return {f"{host}:{number}": state for (host, number), state in zip(pairs, states, strict=True)}


def decode_rate(config: TrainConfig, duration_s: float = RATE_S) -> DecodeRate:
    """The rate at which this host reads and decodes training images after the first batch. Raises ShardsetError."""
    from trainer.data.splits import open_data

    image = replace(config.image, augment_repeats=1)
    stream = open_data(replace(uncached(config), global_batch_size=RATE_BATCH, accumulate=1, image=image), 0, 1).train
    start, num_images = time.perf_counter(), 0
    for number, (_, _, batch) in enumerate(stream.run(iter([(0, range(len(stream)))]))):
        # The first batch waits for indexes and connections, so it counts only if there is no other.
        if number or len(stream) == 1:
            num_images += int((batch["weight"] > 0).sum())
        else:
            start = time.perf_counter()
        if num_images and time.perf_counter() - start > duration_s:
            break
    return DecodeRate(num_images / max(1e-9, time.perf_counter() - start), num_images)


def uncached(config: TrainConfig) -> TrainConfig:
    """The config without the disk cache: a probe must leave no files behind, and measure the bucket."""
    return replace(config, cache_dir=None, cache_bytes=None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _port(host: str, number: int, timeout_s: float) -> PortState:
    try:
        socket.create_connection((host, number), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return "closed"
    except OSError:  # no answer in time, no route, an unknown name
        return "filtered"
    return "open"


def _main(arguments: list[str]) -> int:
    match arguments:
        case ["devices", strategy]:
            print(json.dumps(asdict(local_devices(strategy))))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
