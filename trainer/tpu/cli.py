"""`shardset tpu VERB`: the Cloud TPU API (v2 to v6e), by gcloud, run or printed.

Every flag is in the reference documentation of gcloud (the GA commands of `gcloud compute tpus`).
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardset.errors import DOCS, ConfigError
from shardset.program import PREEMPTED, Parser
from shardset.version import __version__
from trainer.config import check_addresses
from trainer.errors import CloudError, Preempted
from trainer.flags import add_config_flags, config_flags

Command = tuple[str, ...]
CommandsOf = Callable[[argparse.Namespace], list[Command]]

FOLDER = "~/shardset-tpu"
"""The folder for all files on a TPU VM."""

WHEEL = f"shardset-{__version__}-py3-none-any.whl"
PYTHON = f"{FOLDER}/env/bin/python"
LOG = f"{FOLDER}/train.log"
PID = f"{FOLDER}/train.pid"

BACKENDS = {"xla": ("tpu", "trainer train"), "torchtpu": ("torchtpu", "trainer.tpu.processes")}
"""Of each back end for TPUs: the extra of this project that brings it, and what trains with it on a
machine.
"""

RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
}
"""The runtime version for PyTorch by TPU generation, from Google's table of TPU software versions.
"""


def register(verbs: Any) -> None:
    """Adds `tpu` and its verbs to the command line of the trainer."""
    top = verbs.add_parser(
        "tpu", help="the Cloud TPU API, v2 to v6e: TPU VMs by gcloud", allow_abbrev=False
    )
    verbs_of_tpu = top.add_subparsers(required=True, metavar="VERB")
    added: dict[CommandsOf, Parser] = {}

    def flag(name: str, text: str, *verbs: CommandsOf, **options: Any) -> None:
        for commands_of in verbs or VERBS:
            added[commands_of].add_argument(name, help=text, **options)

    for commands_of, text in VERBS.items():
        verb = verbs_of_tpu.add_parser(
            commands_of.__name__, help=text, description=text, allow_abbrev=False
        )
        verb.set_defaults(command=_run, commands_of=commands_of)
        added[commands_of] = verb
    flag("name", "name of the TPU VM")
    flag("--zone", "zone, for example europe-west4-a", required=True)
    flag("--project", "project (default: gcloud's)")
    text = "further flag of gcloud, for example --gcloud=--internal-ip"
    flag("--gcloud", text, action="append", default=[], metavar="FLAG")
    flag("--dry-run", "only print the commands", action="store_true")
    flag("--debug", "show tracebacks", action="store_true")
    text = "type, for example v6e-16, v5litepod-16 (v5e), v4-32"
    flag("--accelerator-type", text, create, required=True)
    text = "runtime version (default: Google's for PyTorch on this generation)"
    flag("--runtime-version", text, create)
    flag("--spot", "cheaper, and may be preempted at any time", create, action="store_true")
    flag("--wheel", "wheel to install (default: built from this source tree)", setup, type=Path)
    text = "set an environment variable on the workers"
    flag("--env", text, train, action="append", default=[], metavar="N=VALUE")
    add_config_flags(added[train])
    text = "xla (torch_xla, the default) or torchtpu, which never ran on a TPU here"
    flag("--backend", text, setup, train, choices=sorted(BACKENDS), default="xla")
    flag("--worker", "number of a worker (default: all)", ssh, logs, default="all")
    flag("--command", "command; without one, a shell", ssh, dest="shell_command")
    flag("--follow", "continue with new lines until Ctrl-C", logs, action="store_true")


def create(options: argparse.Namespace) -> list[Command]:
    """Returns when the TPU is ready; fails if the zone has none."""
    type_ = options.accelerator_type
    version = options.runtime_version or RUNTIMES.get(type_.partition("-")[0])
    if version is None:
        raise ConfigError(
            f"--accelerator-type {type_}: expected a type such as v6e-16, v5litepod-16 (v5e),"
            " v5p-8, v4-32 or v3-32; for another generation give --runtime-version too"
        )
    words = [f"--accelerator-type={type_}", f"--version={version}", *["--spot"] * options.spot]
    return [_gcloud(options, "create", options.name, *words)]


def setup(options: argparse.Namespace) -> list[Command]:
    """Builds the wheel if none is given, copies it to all workers and installs it there, or updates
    it.

    The TPU runtimes have Python 3.10. uv installs the 3.11 that this project needs, and removes the
    other back end.
    """
    source, build = Path(__file__).parents[2], []
    wheel = options.wheel or source / "build" / "tpu" / WHEEL
    if options.wheel is None:
        words = ("--quiet", "--no-deps", f"--wheel-dir={wheel.parent}", str(source))
        build = [(sys.executable, "-m", "pip", "wheel", *words)]
    uv = "~/.local/bin/uv"
    extras = f"trainer,{BACKENDS[options.backend][0]}"
    steps = (
        f"mkdir -p {FOLDER}",
        f"(test -x {uv} || python3 -m pip install --quiet --user uv)",
        f"{uv} venv --quiet --allow-existing --python 3.11 {FOLDER}/env",
        f"{uv} pip install --quiet --exact --python {PYTHON} --reinstall-package shardset "
        f'"$HOME/{wheel.name}[{extras}]"',
    )
    copy = _gcloud(options, "scp", str(wheel), f"{options.name}:", "--worker=all")
    return [*build, copy, _ssh(options, " && ".join(steps))]


def train(options: argparse.Namespace) -> list[Command]:
    """Returns when the training is done.

    The trainer runs in a separate session on each worker, so that it outlives the connection.
    """
    given = config_flags(options)
    check_addresses(given.config())
    for setting in options.env:
        if not setting.partition("=")[0].isidentifier() or "=" not in setting:
            raise ConfigError(
                f"--env {setting!r} is not NAME=VALUE, for example --env LIBTPU_INIT_ARGS=--flag=1"
            )
    environment = shlex.join(["env", "PJRT_DEVICE=TPU", *options.env])
    program = f"{PYTHON} -m {BACKENDS[options.backend][1]} {shlex.join(given.arguments())}"
    running = "echo a training runs here already: tpu logs --follow shows it >&2"
    steps = (
        f"if pkill -0 -f -F {PID} trainer 2> /dev/null; then {running}; exit 1; fi",
        f"touch {LOG} && start=$(stat -c %s {LOG}) || exit 1",
        f"{environment} setsid {program} >> {LOG} 2>&1 < /dev/null & echo $! > {PID}",
        f"tail -c +$((start + 1)) -f --pid=$! {LOG}; wait $!",
    )
    return [_ssh(options, "; ".join(steps))]


def ssh(options: argparse.Namespace) -> list[Command]:
    """A command on all workers, or on one; without a command a shell on one."""
    return [_ssh(options, options.shell_command, options.worker)]


def logs(options: argparse.Namespace) -> list[Command]:
    """What the trainer printed on each worker.

    The run folder has the same by host, see `merge-logs`.
    """
    follow = "-f " if options.follow else ""
    show = f'tail -n 1000 {follow}{LOG} | sed -u "s/^/$(hostname): /"'
    return [_ssh(options, show, options.worker)]


def delete(options: argparse.Namespace) -> list[Command]:
    """Deletes the TPU, then lists the TPU VMs and the disks that remain in the zone."""
    project = [f"--project={options.project}"] * bool(options.project)
    disks = ("gcloud", "compute", "disks", "list", f"--zones={options.zone}", *project)
    return [_gcloud(options, "delete", options.name, "--quiet"), _gcloud(options, "list"), disks]


VERBS: dict[CommandsOf, str] = {
    create: "create a TPU VM or a slice",
    setup: "build this project's wheel and install it on all workers",
    train: "run `shardset train` on all workers and print their output",
    ssh: "run a command on all workers at once, or open a shell on one",
    logs: "print the last lines of the logs of all workers",
    delete: "delete the TPU, then list what remains and costs money",
}


def _gcloud(options: argparse.Namespace, *words: str) -> Command:
    """`gcloud compute tpus tpu-vm WORDS`, in its zone and project."""
    project = [f"--project={options.project}"] * bool(options.project)
    place = [f"--zone={options.zone}", *project, *options.gcloud]
    return ("gcloud", "compute", "tpus", "tpu-vm", *words, *place)


def _ssh(options: argparse.Namespace, command: str | None, worker: str = "all") -> Command:
    """Runs a command on workers at the same time; None opens a shell on one."""
    if command is None:
        return _gcloud(options, "ssh", options.name, f"--worker={worker.replace('all', '0')}")
    return _gcloud(options, "ssh", options.name, f"--worker={worker}", f"--command={command}")


def _run(options: argparse.Namespace) -> None:
    """Runs the commands of a verb until one fails, or prints them.

    Raises Preempted if the trainer was asked to stop and has saved, CloudError for other failures.
    """
    for command in options.commands_of(options):
        if options.dry_run:
            print(shlex.join(command), flush=True)
            continue
        try:
            code = subprocess.run(command).returncode
        except FileNotFoundError as error:
            link = "https://cloud.google.com/sdk/docs/install"
            raise CloudError(f"{command[0]} is not installed; get it from {link}") from error
        except KeyboardInterrupt:
            text = "; a training on the TPU continues: `tpu logs --follow` shows it"
            raise KeyboardInterrupt(text) from None
        if code == PREEMPTED:
            raise Preempted(
                f"{options.name} was asked to stop, everything is saved; the same command resumes"
            )
        if code:
            raise CloudError(
                f"{' '.join(command[:5])}: ended with code {code}, see above;"
                f" {DOCS}/how-to/tpu.md explains the usual errors"
            )
