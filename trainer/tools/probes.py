"""Looks at the machine and the network for `python -m trainer doctor`; `doctor` says what it means.

python -m trainer.tools.probes devices STRATEGY    prints the devices of a run as JSON, in a process that may be killed
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
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardset.addresses import without_user
from shardset.errors import ConfigError, NotFound, ShardsetError, StorageError
from shardset.storage.base import Storage
from shardset.storage.open import is_address, open_storage
from trainer import config as configs
from trainer.config import TrainConfig

DISTRIBUTIONS = ("torch", "torch_xla", "torchvision", "libtpu")
STORAGE_API = "https://storage.googleapis.com"
METADATA_SERVER = "169.254.169.254"

DEVICES_TIMEOUT_S = 180.0
METADATA_TIMEOUT_S = 1.0
CONNECT_TIMEOUT_S = 3.0
BUCKET_PATIENCE_S = 10.0
RATE_BATCH = 64
RATE_S = 1.0

PortState = Literal["open", "closed", "filtered"]
"""Somebody answers; nobody answers but the machine does; the network swallows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What a run would train on: `kind` as torch names it, `platform` as PJRT_DEVICE does (None without torch_xla)."""

    strategy: str
    kind: str
    platform: str | None
    num_hosts: int
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run as its folder tells it: its configuration, and its records (`trainer.record.metrics`) in their order."""

    config: TrainConfig
    records: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Rate:
    """Images a second that this host read and decoded, and how many images that was measured on."""

    images_per_second: float
    num_images: int


def versions() -> dict[str, str | None]:
    """The installed versions; None for what is not installed."""
    return {name: _version(name) for name in DISTRIBUTIONS}


def pins() -> dict[str, str]:
    """The versions that the installed torch_xla was built for, from its own requirements: `libtpu==0.0.21`."""
    try:
        wanted = importlib.metadata.requires("torch_xla") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {found[1]: found[2] for spec in wanted if (found := re.match(r"(\w+)==([\w.]+)", spec))}


def num_chips() -> int:
    """TPU chips that the system shows, whether or not anything can use them."""
    return len([*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")])


def devices(strategy: str, timeout_s: float = DEVICES_TIMEOUT_S) -> Devices | str:
    """What a run with this strategy would train on, or why that can't be said.

    In a process of its own: a slice waits until all its hosts look, and who has looked keeps the TPU.
    """
    words = [sys.executable, "-m", "trainer.tools.probes", "devices", strategy]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"the devices did not come up within {timeout_s:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    return Devices(**json.loads(lines[-1]))


def here(strategy: str) -> Devices:
    """The devices of this process; starts the runtime, and with it the TPU."""
    from trainer.runtime.launch import choose, running

    chosen = choose(strategy)  # type: ignore[arg-type]
    # The strategy `replica` starts its processes itself; the same devices are seen by `spmd` in one.
    with running("spmd" if chosen == "replica" else chosen, "fp32") as found:
        found.join(DEVICES_TIMEOUT_S)
        return Devices(
            strategy=chosen,
            kind=found.device.type,
            platform=os.environ.get("PJRT_DEVICE") if found.device.type == "xla" else None,
            num_hosts=found.num_hosts,
            num_devices=found.num_devices,
        )


def metadata(path: str) -> str | None:
    """What the metadata server of Compute Engine says; None where there is none, or nothing under that path."""
    host = os.environ.get("GCE_METADATA_HOST", METADATA_SERVER)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{path}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_S) as response:
            # Other clouds have a server at this address too.
            return response.read().decode() if response.headers.get("Metadata-Flavor") == "Google" else None
    except OSError:
        return None


def zone() -> str | None:
    """The zone of this machine: us-central2-b."""
    text = metadata("zone")
    return None if text is None else text.rpartition("/")[2]


def workers() -> list[str]:
    """The addresses of all workers of this TPU slice, in their order; none elsewhere."""
    text = metadata("attributes/worker-network-endpoints") or ""
    return [parts[2] for parts in (endpoint.split(":") for endpoint in text.split(",")) if len(parts) > 2]


def bucket_place(bucket: str) -> str | StorageError:
    """Where a bucket lies, or why that can't be said, within seconds."""
    from shardset.storage.gcs import bucket_location
    from shardset.storage.retry import RetryPolicy

    try:
        return bucket_location(bucket, RetryPolicy(give_up_after_s=BUCKET_PATIENCE_S))
    except StorageError as error:
        return error


def clock_skew_s() -> float | None:
    """How far this machine's clock is ahead of Cloud Storage's; None if it gives no answer."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    url = without_user(emulator if "://" in emulator else f"http://{emulator}") if emulator else STORAGE_API
    before = time.time()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_TIMEOUT_S) as response:
            date = response.headers.get("Date")
    except urllib.error.HTTPError as error:  # a refusal has its date too
        date = error.headers.get("Date")
    except OSError:
        return None
    # The header has whole seconds: half a second after them is the best guess.
    return None if date is None else before - email.utils.parsedate_to_datetime(date).timestamp() - 0.5


def write_refused(url: str) -> str | None:
    """Why a file can't be written, read back and deleted in a run folder; None if it can. Leaves nothing."""
    folder = url if is_address(url) else str(standing_folder(Path(url)))
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


def recorded(url: str) -> Recorded | None:
    """The run in a folder; None if there is none. Raises StorageError, or ConfigError for a record that is damaged."""
    from trainer.record.metrics import METRICS, records

    folder = open_storage(url)
    try:
        config = json.loads(folder.read(configs.RECORD))
    except NotFound:
        return None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{folder.url}/{configs.RECORD}: not JSON ({error}); restore it") from error
    try:
        lines = folder.read(METRICS)
    except NotFound:
        lines = b""
    return Recorded(config=configs.from_dict(config), records=records(lines))


def standing_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def sizes(storage: Storage) -> dict[str, int]:
    """Every object of a shard set and its size, by one listing."""
    return {stat.name: stat.num_bytes for stat in storage.list()}


def free_bytes(path: str) -> int:
    """On the disk where a path is or would be."""
    return shutil.disk_usage(standing_folder(Path(path))).free


def held_bytes(path: str) -> int:
    """What the files of a folder hold; 0 if it is not there."""
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def temporary_folder() -> str:
    """Where files wait for their upload."""
    return tempfile.gettempdir()


def available_memory() -> int:
    """Bytes that can be had without swapping: of the machine, or what its container leaves if that is less."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return min(int(lines["MemAvailable"].split()[0]) << 10, _container_memory())


def open_file_limit() -> int:
    """How many files this process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def ports(hosts: Iterable[str], numbers: Iterable[int], timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, PortState]:
    """By `host:port`, what a plain TCP connection finds; all at the same time."""
    pairs = list(itertools.product(hosts, numbers))
    with ThreadPoolExecutor(max(1, min(64, len(pairs)))) as pool:
        states = pool.map(lambda pair: _port(pair[0], pair[1], timeout_s), pairs)
        return {f"{host}:{number}": state for (host, number), state in zip(pairs, states, strict=True)}


def decode_rate(config: TrainConfig, duration_s: float = RATE_S) -> Rate:
    """How fast this host reads and decodes training images, after the first batch; raises ShardsetError."""
    from trainer.data.splits import open_data

    stream = open_data(replace(_uncached(config), global_batch_size=RATE_BATCH, accumulate=1), 0, 1).train
    start, num_images = time.perf_counter(), 0
    for number, (_, _, batch) in enumerate(stream.run(iter([(0, range(len(stream)))]))):
        # The first one waits for indexes and connections; only a set of one batch has no other.
        if number or len(stream) == 1:
            num_images += int((batch["weight"] > 0).sum())
        else:
            start = time.perf_counter()
        if num_images and time.perf_counter() - start > duration_s:
            break
    return Rate(num_images / max(1e-9, time.perf_counter() - start), num_images)


def _uncached(config: TrainConfig) -> TrainConfig:
    """Without the cache on a local disk: looking is to leave nothing, and to see how fast the bucket is."""
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


def _container_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    try:
        limit, used = ((root / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - int(used))


def environment() -> Mapping[str, str]:
    """The variables of this process."""
    return os.environ


def _main(words: list[str]) -> int:
    match words:
        case ["devices", strategy]:
            found = here(strategy)
            print(json.dumps({name: getattr(found, name) for name in Devices.__slots__}))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


def sharded(config: TrainConfig, num_hosts: int) -> Any:
    """The training and the evaluation stream of host 0 of so many; raises ShardsetError."""
    from trainer.data.splits import open_data

    return open_data(_uncached(config), 0, num_hosts)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
