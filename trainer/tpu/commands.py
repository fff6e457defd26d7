"""Pure: what is wanted -> the words of a command. Nothing here runs anything.

Every flag is one of gcloud's reference documentation (the GA commands of `gcloud compute tpus` and `gcloud storage`).
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardset.errors import ConfigError
from shardset.version import __version__

Words = tuple[str, ...]

FOLDER = "shardset-tpu"
"""Where everything lies on a TPU VM, below the home folder."""

WHEEL = f"shardset-{__version__}-py3-none-any.whl"
LOG = "train.log"
PYTHON = f"~/{FOLDER}/env/bin/python"
ENVIRONMENT = {"PJRT_DEVICE": "TPU"}
ALL = "all"

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
"""The runtime version that Google's table of TPU software versions names for PyTorch, by generation."""

REFUSED = {
    "XLA_USE_BF16": "torch_xla no longer reads it; use --precision bf16",
    "XLA_DOWNCAST_BF16": "torch_xla no longer reads it; use --precision bf16",
    "XRT_TPU_CONFIG": "XRT is gone from torch_xla; PJRT_DEVICE=TPU is set by this command",
}
"""Variables of older tutorials, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A TPU VM or a slice of them, by name; `internal_ip` is how to reach it."""

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
class Request:
    """What is to be created. `valid_for`: a queued request that was not met after it (`6h`) fails."""

    node: Node
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
        """The runtime version: the one asked for, or the usual one of this generation."""
        return self.runtime_version or RUNTIMES[self.accelerator_type.partition("-")[0]]


# --- TPU VMs and queued resources ------------------------------------------------------------------------------------


def describe(node: Node) -> Words:
    """The state of the TPU VM, as JSON."""
    return ("gcloud", "compute", "tpus", "tpu-vm", "describe", node.name, *_place(node), "--format=json")


def describe_request(node: Node) -> Words:
    """The state of its queued request, as JSON."""
    return ("gcloud", "compute", "tpus", "queued-resources", "describe", node.name, *_place(node), "--format=json")


def create(request: Request) -> Words:
    """Asks for the TPU: by a queued request of the same name, or directly."""
    node = request.node
    common = (
        f"--accelerator-type={request.accelerator_type}",
        *_given("network", request.network),
        *_given("subnetwork", request.subnetwork),
        *_given("service-account", request.service_account),
        *_given("metadata-from-file", request.startup_script and f"startup-script={request.startup_script}"),
        *(("--internal-ips",) if node.internal_ip else ()),
        *(("--spot",) if request.spot else ()),
    )
    if request.queued:
        what = ("queued-resources", "create", node.name, f"--node-id={node.name}", *_place(node))
        version = f"--runtime-version={request.runtime}"
        extra = _given("valid-until-duration", request.valid_for)
    else:
        what, version, extra = ("tpu-vm", "create", node.name, *_place(node)), f"--version={request.runtime}", ()
    return ("gcloud", "compute", "tpus", *what, version, *common, *extra)


def delete(node: Node) -> Words:
    """Deletes a TPU VM that was created directly."""
    return ("gcloud", "compute", "tpus", "tpu-vm", "delete", node.name, *_place(node), "--quiet")


def delete_request(node: Node) -> Words:
    """Deletes a queued request together with its TPU VM."""
    what = ("queued-resources", "delete", node.name, *_place(node))
    return ("gcloud", "compute", "tpus", *what, "--force", "--quiet")


def remaining(node: Node, run_dir: str | None) -> dict[str, Words]:
    """What may still cost money, by its name: each command lists one kind."""
    project = _given("project", node.project)
    lists = {
        "TPU VMs in this zone": ("gcloud", "compute", "tpus", "tpu-vm", "list", *_place(node)),
        "queued requests in this zone": ("gcloud", "compute", "tpus", "queued-resources", "list", *_place(node)),
        "disks in this zone": ("gcloud", "compute", "disks", "list", f"--zones={node.zone}", *project),
    }
    if run_dir is not None:
        lists["bytes in the run folder"] = ("gcloud", "storage", "du", "--summarize", bucket_url(run_dir), *project)
    return lists


# --- work on the workers ---------------------------------------------------------------------------------------------


def build_wheel(source: Path, folder: Path) -> Words:
    """Builds this project's wheel into a folder here."""
    return (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(source))


def copy_wheel(node: Node, wheel: Path) -> Words:
    """Copies the wheel into the home folder of every worker."""
    return _scp(node, str(wheel), f"{node.name}:", ALL)


def install(node: Node, wheel: str = WHEEL) -> Words:
    """Makes the environment on every worker, or brings it up to date.

    The runtimes have Python 3.10; uv brings the 3.11 that this project needs.
    """
    uv = "~/.local/bin/uv"
    steps = (
        f"mkdir -p ~/{FOLDER}",
        f"(test -x {uv} || python3 -m pip install --quiet --user uv)",
        f"{uv} venv --quiet --allow-existing --python 3.11 ~/{FOLDER}/env",
        f'{uv} pip install --quiet --python {PYTHON} --reinstall-package shardset "$HOME/{wheel}[trainer,tpu]"',
    )
    return _ssh(node, " && ".join(steps))


def doctor(node: Node, arguments: Sequence[str], environment: Mapping[str, str]) -> Words:
    """Checks every worker, all at the same time: the devices of a slice come up together or not at all."""
    return _ssh(node, _python(environment, "-m", "trainer", "doctor", *arguments))


def train(node: Node, arguments: Sequence[str], environment: Mapping[str, str]) -> Words:
    """Starts training on every worker, or joins the training that runs there, until it ends."""
    return _ssh(node, _python(environment, "-m", "trainer.tpu.worker", "train", *arguments))


def stop(node: Node) -> Words:
    """SIGTERM to the trainer on every worker: it saves and ends."""
    return _ssh(node, _python({}, "-m", "trainer.tpu.worker", "stop"))


def fetch_log(node: Node, worker: int, target: Path) -> Words:
    """Copies the log of one worker here.

    Not `ssh --output-directory`: gcloud 528 writes to a folder named None with it.
    """
    return _scp(node, f"{node.name}:{FOLDER}/{LOG}", str(target), str(worker))


def upload_logs(files: Sequence[Path], run_dir: str, project: str | None) -> Words:
    """Copies logs from here into the run folder."""
    target = f"{bucket_url(run_dir)}/tpu-logs/"
    return ("gcloud", "storage", "cp", *map(str, files), target, *_given("project", project))


# --- parts -----------------------------------------------------------------------------------------------------------


def shown(words: Words) -> str:
    """The command as a shell takes it."""
    return shlex.join(words)


def environment_of(settings: Sequence[str]) -> dict[str, str]:
    """The variables of a training: PJRT_DEVICE=TPU and those of `--env NAME=VALUE`; raises ConfigError."""
    found = dict(ENVIRONMENT)
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {setting!r} is not NAME=VALUE, for example --env LIBTPU_INIT_ARGS=--flag=1")
        if name in REFUSED:
            raise ConfigError(f"--env {setting}: {REFUSED[name]}")
        found[name] = value
    return found


def bucket_url(url: str) -> str:
    """The URL itself, without a slash at its end; ConfigError unless it is in a bucket."""
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?", url):
        raise ConfigError(f"{url}: expected gs://BUCKET/FOLDER; the disk of a TPU VM goes with it")
    return url.rstrip("/")


def _ssh(node: Node, command: str, worker: str = ALL) -> Words:
    what = ("tpu-vm", "ssh", node.name, *_place(node), *_internal(node), f"--worker={worker}", f"--command={command}")
    return ("gcloud", "compute", "tpus", *what)


def _scp(node: Node, source: str, target: str, worker: str) -> Words:
    what = ("tpu-vm", "scp", source, target, *_place(node), *_internal(node), f"--worker={worker}")
    return ("gcloud", "compute", "tpus", *what)


def _python(environment: Mapping[str, str], *words: str) -> str:
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*settings, PYTHON, shlex.join(words)])


def _place(node: Node) -> Words:
    return (f"--zone={node.zone}", *_given("project", node.project))


def _internal(node: Node) -> Words:
    return ("--internal-ip",) if node.internal_ip else ()


def _given(flag: str, value: str | None) -> Words:
    return (f"--{flag}={value}",) if value else ()
