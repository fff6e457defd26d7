"""The commands for a TPU VM or slice. Pure functions: nothing is run here.

Every flag is in the reference documentation of gcloud (the GA commands of `gcloud compute tpus` and `gcloud storage`).
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardset.errors import ConfigError
from shardset.version import __version__
from trainer.runtime.machine import REFUSED

Command = tuple[str, ...]

FOLDER = "shardset-tpu"
"""The folder for all files on a TPU VM, in the home folder."""

WHEEL = f"shardset-{__version__}-py3-none-any.whl"
PYTHON = f"~/{FOLDER}/env/bin/python"
LOG = f"~/{FOLDER}/train.log"
PID = f"~/{FOLDER}/train.pid"
NOT_SET_UP = 127
"""The exit code of a shell for a program that does not exist."""

STOP_S = 900
"""How long `stop` waits for the trainer to save."""

BACKENDS = {"xla": ("tpu", "trainer train"), "torchtpu": ("torchtpu", "trainer.tpu.processes")}
"""Of each back end for TPUs: the extra of this project that brings it, and what trains with it on a machine."""

RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
}
"""The runtime version for PyTorch by TPU generation, from Google's table of TPU software versions."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """A TPU VM or slice. `internal_ips`: it has no external addresses, and is reached by its internal ones."""

    name: str
    zone: str
    project: str | None = None
    internal_ips: bool = False

    def command(self, *words: str) -> Command:
        """`gcloud compute tpus tpu-vm WORDS`, in its zone and project."""
        return ("gcloud", "compute", "tpus", "tpu-vm", *words, f"--zone={self.zone}", *self.flags(project=self.project))

    def ssh(self, command: str | None, worker: str = "all") -> Command:
        """Runs a command on its workers at the same time; None opens a shell on one."""
        return self.command("ssh", self.name, *self._internal, *self.flags(worker=worker, command=command))

    def scp(self, source: Path) -> Command:
        """Copies a file into the home folder of every worker."""
        return self.command("scp", str(source), f"{self.name}:", *self._internal, "--worker=all")

    @staticmethod
    def flags(**values: str | None) -> Command:
        """`--NAME=VALUE` of each value that is given."""
        return tuple(f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value)

    @property
    def _internal(self) -> Command:
        return ("--internal-ip",) if self.internal_ips else ()


def create(tpu: Tpu, accelerator_type: str, version: str | None, *, spot: bool, **flags: str | None) -> Command:
    """Creates the TPU VM; `version` None: the usual one of its generation. Raises ConfigError if there is none."""
    version = version or RUNTIMES.get(accelerator_type.partition("-")[0])
    if version is None:
        raise ConfigError(
            f"--accelerator-type {accelerator_type}: expected a type such as v3-32, v4-32, v5litepod-16 (v5e), v5p-8 "
            "or v6e-8; for another generation give --runtime-version too"
        )
    switches = (*(("--internal-ips",) if tpu.internal_ips else ()), *(("--spot",) if spot else ()))
    words = Tpu.flags(accelerator_type=accelerator_type, version=version, **flags)
    return tpu.command("create", tpu.name, *words, *switches)


def setup(tpu: Tpu, wheel: Path | None, backend: str) -> list[Command]:
    """Builds this project's wheel if none is given, copies it to every worker and installs it there.

    The TPU runtimes have Python 3.10. uv installs the 3.11 that this project needs, and removes the other back end.
    """
    commands: list[Command] = []
    if wheel is None:
        source = Path(__file__).parents[2]
        if not (source / "setup.py").is_file():
            raise ConfigError(f"{source} has no source tree to build a wheel from; give one with --wheel FILE")
        wheel = source / "build" / "tpu" / WHEEL
        flags = ("--quiet", "--no-deps", f"--wheel-dir={wheel.parent}")
        commands.append((sys.executable, "-m", "pip", "wheel", *flags, str(source)))
    uv = "~/.local/bin/uv"
    steps = (
        f"mkdir -p ~/{FOLDER}",
        f"(test -x {uv} || python3 -m pip install --quiet --user uv)",
        f"{uv} venv --quiet --allow-existing --python 3.11 ~/{FOLDER}/env",
        f"{uv} pip install --quiet --exact --python {PYTHON} --reinstall-package shardset "
        f'"$HOME/{wheel.name}[trainer,{BACKENDS[backend][0]}]"',
    )
    return [*commands, tpu.scp(wheel), tpu.ssh(" && ".join(steps))]


def doctor(tpu: Tpu, environment: str, arguments: Sequence[str]) -> Command:
    """Checks all workers at the same time, because the devices of a slice only start together."""
    return tpu.ssh(f"{environment} {PYTHON} -m trainer doctor {shlex.join(arguments)}")


def train(tpu: Tpu, environment: str, arguments: Sequence[str], backend: str) -> Command:
    """Trains on all workers and prints their logs. In a session of its own, so that it outlives the connection."""
    program = f"{PYTHON} -m {BACKENDS[backend][1]} {shlex.join(arguments)}"
    running = "a training runs here already: tpu logs --follow shows it, tpu stop ends it"
    steps = (
        f"if pkill -0 -f -F {PID} trainer 2> /dev/null; then echo {shlex.quote(running)} >&2; exit 1; fi",
        f"touch {LOG} && start=$(stat -c %s {LOG}) || exit {NOT_SET_UP}",
        f"{environment} setsid {program} >> {LOG} 2>&1 < /dev/null & echo $! > {PID}",
        f"tail -c +$((start + 1)) -f --pid=$! {LOG}; wait $!",
    )
    return tpu.ssh("; ".join(steps))


def stop(tpu: Tpu) -> Command:
    """Sends SIGTERM to the trainer on every worker, and waits until it has saved and ended."""
    return tpu.ssh(f"pkill -TERM -f -F {PID} trainer && timeout {STOP_S} tail -f --pid=$(cat {PID}) /dev/null")


def logs(tpu: Tpu, worker: str, lines: str, *, follow: bool) -> Command:
    """Prints the last lines of the workers' logs, each with the worker's name."""
    return tpu.ssh(f'tail -n {lines} {"-f " if follow else ""}{LOG} | sed -u "s/^/$(hostname): /"', worker)


def delete(tpu: Tpu) -> Command:
    """Deletes the TPU VM with all its workers."""
    return (*tpu.command("delete", tpu.name), "--quiet")


def remaining(tpu: Tpu, run_dir: str | None) -> dict[str, Command]:
    """Commands that list what may still cost money, by a name for each list."""
    project = Tpu.flags(project=tpu.project)
    lists: dict[str, Command] = {
        "TPU VMs in this zone": tpu.command("list"),
        "disks in this zone": ("gcloud", "compute", "disks", "list", f"--zones={tpu.zone}", *project),
    }
    if run_dir is not None:
        lists["bytes in the run folder"] = ("gcloud", "storage", "du", "--summarize", run_dir.rstrip("/"), *project)
    return lists


def environment(settings: Sequence[str]) -> str:
    """PJRT_DEVICE=TPU and the settings NAME=VALUE of `--env`, as a shell takes them. Raises ConfigError."""
    variables = {"PJRT_DEVICE": "TPU"}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {setting!r} is not NAME=VALUE, for example --env LIBTPU_INIT_ARGS=--flag=1")
        if name in REFUSED:
            raise ConfigError(f"--env {setting}: {REFUSED[name]}")
        variables[name] = value
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
