"""The resources of this machine for a process of a run: processors, memory, devices."""

import os
import shutil
import sysconfig
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardset.errors import ConfigError
from shardset.stream.world import num_local_processes
from trainer.config import Precision

CGROUP = Path("/sys/fs/cgroup")
METADATA_SERVER = "169.254.169.254"
METADATA_TIMEOUT_S = 1.0
REFUSED = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Environment variables of older tutorials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine as a run without a recipe sees it: the same in every process of a run on equal
    machines.
    """

    device: str
    """`cpu`, `cuda` or `tpu`."""
    name: str
    precision: Precision
    """The fastest that trains as well there as float32."""
    num_processes: int
    asks_for_xla: bool = False
    """Whether the environment names a device of torch_xla."""
    host_bytes: int
    """Host memory of this process."""


def machine() -> Machine:
    """This machine. Starts no runtime of torch_xla."""
    import torch  # seconds, so not before it is needed

    host_bytes = total_memory() // num_local_processes()
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available() and os.environ.get("PJRT_DEVICE") in (None, "CUDA"):
        properties = torch.cuda.get_device_properties(0)
        device, name = "cuda", str(properties.name)
        precision = precision_of((properties.major, properties.minor))
    elif num_chips() and os.environ.get("PJRT_DEVICE") in (None, "TPU"):
        device, name, precision = "tpu", "TPU", "bf16"
    else:
        device, name, precision = "cpu", f"a CPU with {os.cpu_count()} cores", "fp32"
    return Machine(
        device=device,
        name=name,
        precision=precision,
        num_processes=num_processes,
        asks_for_xla="PJRT_DEVICE" in os.environ,
        host_bytes=host_bytes,
    )


def num_chips() -> int:
    """TPU chips that the system lists, usable or not."""
    return len([*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")])


def tpu_workers() -> tuple[list[str], int]:
    """The addresses of all workers of this TPU slice in order, and the number of this one; none
    elsewhere.

    From the environment, as GKE sets it, or from the metadata server.
    """
    if names := os.environ.get("TPU_WORKER_HOSTNAMES"):
        return names.split(","), int(os.environ.get("TPU_WORKER_ID", "0"))
    text = metadata("attributes/worker-network-endpoints") or ""
    fields = (endpoint.split(":") for endpoint in text.split(","))
    number = metadata("attributes/agent-worker-number") if text else None
    return [each[2] for each in fields if len(each) > 2], int(number or "0")


def metadata(path: str) -> str | None:
    """An answer of the metadata server of Compute Engine; None without a server, or without
    anything at that path.
    """
    host = os.environ.get("GCE_METADATA_HOST", METADATA_SERVER)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{path}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_S) as response:
            # Other clouds have a server at this address too, but it does not send this header.
            if response.headers.get("Metadata-Flavor") == "Google":
                return str(response.read().decode())
    except OSError:
        pass
    return None


def precision_of(capability: tuple[int, int]) -> Precision:
    """What CUDA devices of a compute capability train fastest in: bfloat16 from Ampere on, float16
    from Volta on.
    """
    return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"


def check_precision(precision: Precision, capability: tuple[int, int], name: str) -> None:
    """Raises ConfigError for bfloat16 on a CUDA device that has none and would imitate it, slower
    than float32.
    """
    if precision == "bf16" and (fastest := precision_of(capability)) != "bf16":
        raise ConfigError(
            f"precision bf16: {name} does not compute in bfloat16; use --precision {fastest}"
        )


def compile_obstacle(variable: str, compilers: Sequence[str]) -> str | None:
    """Why torch.compile can make no kernels on this machine, with a compiler that the variable
    names or one of these; None if it can.
    """
    if variable not in os.environ and not any(map(shutil.which, compilers)):
        return f"it needs a compiler, {' or '.join(compilers)}, or the path of one in {variable}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return (
            f"it needs Python.h in {sysconfig.get_path('include')}, which the package python3-dev"
            " brings"
        )
    return None


def total_memory(root: Path = CGROUP) -> int:
    """Memory of the machine, or the limit of its container if that is less."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = root / "memory.max"
    text = limit.read_text().strip() if limit.is_file() else "max"
    return installed if text == "max" else min(installed, int(text))
