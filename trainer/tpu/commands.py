"""The commands for a TPU, a request or a training. Pure functions: nothing is run here.

Every flag is in the reference documentation of gcloud (the GA commands of `gcloud compute tpus` and `gcloud storage`).
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardset.errors import ConfigError
from shardset.version import __version__

Command = tuple[str, ...]

FOLDER = "shardset-tpu"
"""The folder for all files on a TPU VM, in the home folder."""

WHEEL = f"shardset-{__version__}-py3-none-any.whl"
LOG = "train.log"
PYTHON = f"~/{FOLDER}/env/bin/python"
ENVIRONMENT = {"PJRT_DEVICE": "TPU"}
ALL = "all"

BACKENDS = {"xla": "tpu", "torchtpu": "torchtpu"}
"""The extra of this project that brings each back end for TPUs, with the torch that it needs."""

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z]")
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
_TYPE = re.compile(r"(v[2-4]|v5p|v5litepod|v6e)-[1-9][0-9]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DURATION = re.compile(r"([0-9]+[smhd])+")

RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
}
"""The runtime version for PyTorch by TPU generation, from Google's table of TPU software versions."""

REFUSED = {
    "XLA_USE_BF16": "torch_xla no longer reads it; use --precision bf16",
    "XLA_DOWNCAST_BF16": "torch_xla no longer reads it; use --precision bf16",
    "XRT_TPU_CONFIG": "XRT is gone from torch_xla; PJRT_DEVICE=TPU is set by this command",
}
"""Environment variables of older tutorials, and what replaces them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuNode:
    """The name and location of a TPU VM or slice. `internal_ip` reaches it by its internal address."""

    name: str
    zone: str
    project: str | None = None
    internal_ip: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} can't name a TPU VM: expected at most 63 of a-z, 0-9 and -, beginning with a letter"
            )
        if not _ZONE.fullmatch(self.zone):
            region = ": that is a region" if _REGION.fullmatch(self.zone) else ""
            raise ConfigError(f"--zone {self.zone}{region}; expected a zone such as us-central2-b")
        if self.project is not None and not _PROJECT.fullmatch(self.project):
            raise ConfigError(f"--project {self.project}: expected a project's id such as my-project-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuRequest:
    """A TPU to create. A queued request that waits longer than `valid_for` (`6h`) fails."""

    node: TpuNode
    accelerator_type: str
    runtime_version: str | None = None
    queued: bool = True
    spot: bool = False
    valid_for: str | None = None
    startup_script: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None

    def __post_init__(self) -> None:
        if not _TYPE.fullmatch(self.accelerator_type):
            raise ConfigError(
                f"--accelerator-type {self.accelerator_type}: expected GENERATION-SIZE such as v3-32, v4-32, "
                "v5litepod-16 (v5e), v5p-8 or v6e-8"
            )
        if self.valid_for is not None and not self.queued:
            raise ConfigError("--valid-for is for queued requests; --direct either gets the TPU at once or fails")
        if self.valid_for is not None and not _DURATION.fullmatch(self.valid_for):
            raise ConfigError(f"--valid-for {self.valid_for}: expected a time such as 90m, 6h or 2d")
        if self.startup_script is not None and not Path(self.startup_script).is_file():
            raise ConfigError(f"--startup-script {self.startup_script}: there is no such file here")

    @property
    def runtime(self) -> str:
        """The given runtime version, or the default of this generation."""
        return self.runtime_version or RUNTIMES[self.accelerator_type.partition("-")[0]]


# --- TPU VMs and queued resources ------------------------------------------------------------------------------------


def describe(node: TpuNode) -> Command:
    """The state of the TPU VM, as JSON."""
    return ("gcloud", "compute", "tpus", "tpu-vm", "describe", node.name, *_location(node), "--format=json")


def describe_request(node: TpuNode) -> Command:
    """The state of its queued request, as JSON."""
    return ("gcloud", "compute", "tpus", "queued-resources", "describe", node.name, *_location(node), "--format=json")


def create(request: TpuRequest) -> Command:
    """Creates the TPU, directly or by a queued request of the same name."""
    node = request.node
    common = (
        f"--accelerator-type={request.accelerator_type}",
        *_flag("network", request.network),
        *_flag("subnetwork", request.subnetwork),
        *_flag("service-account", request.service_account),
        *_flag("metadata-from-file", request.startup_script and f"startup-script={request.startup_script}"),
        *(("--internal-ips",) if node.internal_ip else ()),
        *(("--spot",) if request.spot else ()),
    )
    if request.queued:
        action = ("queued-resources", "create", node.name, f"--node-id={node.name}", *_location(node))
        version = f"--runtime-version={request.runtime}"
        extra = _flag("valid-until-duration", request.valid_for)
    else:
        action, version, extra = ("tpu-vm", "create", node.name, *_location(node)), f"--version={request.runtime}", ()
    return ("gcloud", "compute", "tpus", *action, version, *common, *extra)


def delete(node: TpuNode) -> Command:
    """Deletes a TPU VM that was created directly."""
    return ("gcloud", "compute", "tpus", "tpu-vm", "delete", node.name, *_location(node), "--quiet")


def delete_request(node: TpuNode) -> Command:
    """Deletes a queued request together with its TPU VM."""
    action = ("queued-resources", "delete", node.name, *_location(node))
    return ("gcloud", "compute", "tpus", *action, "--force", "--quiet")


def remaining(node: TpuNode, run_dir: str | None) -> dict[str, Command]:
    """Commands that list what may still cost money, by a name for each list."""
    project = _flag("project", node.project)
    lists = {
        "TPU VMs in this zone": ("gcloud", "compute", "tpus", "tpu-vm", "list", *_location(node)),
        "queued requests in this zone": ("gcloud", "compute", "tpus", "queued-resources", "list", *_location(node)),
        "disks in this zone": ("gcloud", "compute", "disks", "list", f"--zones={node.zone}", *project),
    }
    if run_dir is not None:
        lists["bytes in the run folder"] = ("gcloud", "storage", "du", "--summarize", bucket_url(run_dir), *project)
    return lists


# --- work on the workers ---------------------------------------------------------------------------------------------


def build_wheel(source: Path, folder: Path) -> Command:
    """Builds this project's wheel into a folder here."""
    return (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(source))


def copy_wheel(node: TpuNode, wheel: Path) -> Command:
    """Copies the wheel into the home folder of every worker."""
    return _scp(node, str(wheel), f"{node.name}:", ALL)


def install(node: TpuNode, wheel: str = WHEEL, backend: str = "xla") -> Command:
    """Creates or updates the Python environment on every worker, for one back end.

    The TPU runtimes have Python 3.10. uv installs the 3.11 that this project needs, and removes the other back end.
    """
    uv = "~/.local/bin/uv"
    steps = (
        f"mkdir -p ~/{FOLDER}",
        f"(test -x {uv} || python3 -m pip install --quiet --user uv)",
        f"{uv} venv --quiet --allow-existing --python 3.11 ~/{FOLDER}/env",
        f"{uv} pip install --quiet --exact --python {PYTHON} --reinstall-package shardset "
        f'"$HOME/{wheel}[trainer,{BACKENDS[backend]}]"',
    )
    return _ssh(node, " && ".join(steps))


def doctor(node: TpuNode, arguments: Sequence[str], environment: Mapping[str, str]) -> Command:
    """Checks all workers at the same time, because the devices of a slice only start together."""
    return _ssh(node, _python(environment, "-m", "trainer", "doctor", *arguments))


def train(node: TpuNode, arguments: Sequence[str], environment: Mapping[str, str]) -> Command:
    """Trains on every worker, or joins the training that runs there, until it ends."""
    return _ssh(node, _python(environment, "-m", "trainer.tpu.worker", "train", *arguments))


def stop(node: TpuNode) -> Command:
    """Sends SIGTERM to the trainer on every worker, which saves and exits."""
    return _ssh(node, _python({}, "-m", "trainer.tpu.worker", "stop"))


def fetch_log(node: TpuNode, worker: int, target: Path) -> Command:
    """Copies the log of one worker here.

    Does not use `ssh --output-directory`, with which gcloud 528 writes to a folder named None.
    """
    return _scp(node, f"{node.name}:{FOLDER}/{LOG}", str(target), str(worker))


def upload_logs(files: Sequence[Path], run_dir: str, project: str | None) -> Command:
    """Copies logs from here into the run folder."""
    target = f"{bucket_url(run_dir)}/tpu-logs/"
    return ("gcloud", "storage", "cp", *map(str, files), target, *_flag("project", project))


# --- arguments --------------------------------------------------------------------------------------------------------


def environment_of(settings: Sequence[str]) -> dict[str, str]:
    """The environment of a training: PJRT_DEVICE=TPU and the settings NAME=VALUE of `--env`. Raises ConfigError."""
    variables = dict(ENVIRONMENT)
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {setting!r} is not NAME=VALUE, for example --env LIBTPU_INIT_ARGS=--flag=1")
        if name in REFUSED:
            raise ConfigError(f"--env {setting}: {REFUSED[name]}")
        variables[name] = value
    return variables


def bucket_url(url: str) -> str:
    """The URL without a slash at its end. Raises ConfigError unless it is in a bucket."""
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?", url):
        raise ConfigError(f"{url}: expected gs://BUCKET/FOLDER; the disk of a TPU VM is deleted with it")
    return url.rstrip("/")


def _ssh(node: TpuNode, command: str) -> Command:
    action = ("tpu-vm", "ssh", node.name, *_location(node), *_internal(node), f"--worker={ALL}", f"--command={command}")
    return ("gcloud", "compute", "tpus", *action)


def _scp(node: TpuNode, source: str, target: str, worker: str) -> Command:
    action = ("tpu-vm", "scp", source, target, *_location(node), *_internal(node), f"--worker={worker}")
    return ("gcloud", "compute", "tpus", *action)


def _python(environment: Mapping[str, str], *arguments: str) -> str:
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*settings, PYTHON, shlex.join(arguments)])


def _location(node: TpuNode) -> Command:
    return (f"--zone={node.zone}", *_flag("project", node.project))


def _internal(node: TpuNode) -> Command:
    return ("--internal-ip",) if node.internal_ip else ()


def _flag(flag: str, value: str | None) -> Command:
    return (f"--{flag}={value}",) if value else ()
