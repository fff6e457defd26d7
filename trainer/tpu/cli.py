"""`python -m trainer tpu VERB`: the Cloud TPU API (v2 to v6e), one gcloud command for each verb,
run or printed.

Every flag is in the reference documentation of gcloud (the GA commands of `gcloud compute tpus` and
`gcloud storage`).
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardset.errors import ConfigError
from shardset.program import PREEMPTED
from shardset.storage.open import bucket_of
from shardset.version import __version__
from trainer.config import addresses_of
from trainer.errors import CloudError, Preempted
from trainer.flags import add_config_flags, config_flags
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

GCLOUD_FLAGS = ("network", "subnetwork", "service_account")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """A TPU VM or slice.

    `internal_ips`: it has no external addresses, and is reached by its internal ones.
    """

    name: str
    zone: str
    project: str | None = None
    internal_ips: bool = False

    def command(self, *words: str) -> Command:
        """`gcloud compute tpus tpu-vm WORDS`, in its zone and project."""
        return (
            "gcloud",
            "compute",
            "tpus",
            "tpu-vm",
            *words,
            f"--zone={self.zone}",
            *flags(project=self.project),
        )

    def ssh(self, command: str | None, worker: str = "all") -> Command:
        """Runs a command on its workers at the same time; None opens a shell on one."""
        return self.command(
            "ssh", self.name, *self.internal, *flags(worker=worker, command=command)
        )

    @property
    def internal(self) -> Command:
        """The flag of ssh and scp that reaches it by internal addresses, if it has no others."""
        return ("--internal-ip",) if self.internal_ips else ()


def flags(**values: str | None) -> Command:
    """`--NAME=VALUE` of each value that is given."""
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value)


def register(verbs: Any) -> None:
    """Adds `tpu` and its verbs to the command line of the trainer."""
    top = verbs.add_parser(
        "tpu", help="the Cloud TPU API, v2 to v6e: TPU VMs by gcloud", allow_abbrev=False
    )
    verbs_of_tpu = top.add_subparsers(required=True, metavar="VERB")

    def add(
        name: str, run: Callable[[Tpu, argparse.Namespace], None], text: str
    ) -> argparse.ArgumentParser:
        def command(options: argparse.Namespace) -> None:
            place = {
                name: getattr(options, name) for name in ("name", "zone", "project", "internal_ips")
            }
            run(Tpu(**place), options)

        verb: argparse.ArgumentParser = verbs_of_tpu.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        verb.add_argument("name", help="name of the TPU VM")
        verb.add_argument("--zone", required=True, help="zone, for example europe-west4-a")
        verb.add_argument(
            "--project", help="project (default: the one that gcloud is configured for)"
        )
        verb.add_argument(
            "--internal-ips",
            action="store_true",
            help="no external addresses; reach it from its network",
        )
        verb.add_argument("--dry-run", action="store_true", help="only print the commands")
        verb.add_argument("--debug", action="store_true", help="show tracebacks")
        verb.set_defaults(command=command)
        return verb

    verb = add("create", create, "create a TPU VM or a slice")
    verb.add_argument(
        "--accelerator-type",
        required=True,
        help="type, for example v6e-16, v5litepod-16 (v5e), v4-32",
    )
    verb.add_argument(
        "--runtime-version", help="default: Google's choice for PyTorch on that generation"
    )
    verb.add_argument(
        "--spot", action="store_true", help="cheaper, and may be preempted at any time"
    )
    for flag in GCLOUD_FLAGS:
        verb.add_argument(f"--{flag.replace('_', '-')}", help="as in gcloud")

    verb = add("setup", setup, "build this project's wheel and install it on all workers")
    verb.add_argument(
        "--wheel", type=Path, help="wheel to install (default: built from this source tree)"
    )
    _add_backend(verb)

    verb = add("doctor", doctor, "run `python -m trainer doctor` on all workers at once")
    verb.add_argument(
        "--want-images-per-second", metavar="N", help="the rate that the whole run should read at"
    )
    _add_config(verb)
    verb = add(
        "train", train, "run `python -m trainer train` on all workers and print their output"
    )
    _add_backend(verb)
    _add_config(verb)

    verb = add("ssh", ssh, "open a shell on a worker, or run a command on all of them")
    verb.add_argument(
        "--worker", help="number of a worker, or all (default: 0 for a shell, all for --command)"
    )
    verb.add_argument("--command", dest="shell_command", help="shell command to run")
    verb = add("logs", logs, "print the logs of all workers")
    verb.add_argument("--worker", default="all", help="number of a worker (default: all)")
    verb.add_argument("--lines", type=int, default=1000, help="last lines of each (default: 1000)")
    verb.add_argument("--follow", action="store_true", help="continue with new lines until Ctrl-C")
    add("stop", stop, "ask the trainer on all workers to save and end")
    verb = add("delete", delete, "delete the TPU, then list what remains and costs money")
    verb.add_argument("--run-dir", help="run folder in gs://, to show its size")


def _add_backend(verb: argparse.ArgumentParser) -> None:
    text = "back end: xla (torch_xla, the default) or torchtpu, which never ran on a TPU here"
    verb.add_argument("--backend", choices=sorted(BACKENDS), default="xla", help=text)


def _add_config(verb: argparse.ArgumentParser) -> None:
    text = "set an environment variable on the workers"
    verb.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help=text)
    add_config_flags(verb)


def create(tpu: Tpu, options: argparse.Namespace) -> None:
    """`create`: returns when the TPU is ready. Raises CloudError if there is none."""
    type_ = options.accelerator_type
    version = options.runtime_version or RUNTIMES.get(type_.partition("-")[0])
    if version is None:
        raise ConfigError(
            f"--accelerator-type {type_}: expected a type such as v6e-16, v5litepod-16 (v5e),"
            " v5p-8, v4-32 or v3-32; for another generation give --runtime-version too"
        )
    given = {flag: getattr(options, flag) for flag in GCLOUD_FLAGS}
    switches = ["--internal-ips"] * tpu.internal_ips + ["--spot"] * options.spot
    words = flags(accelerator_type=type_, version=version, **given)
    _run(options, tpu.command("create", tpu.name, *words, *switches))


def setup(tpu: Tpu, options: argparse.Namespace) -> None:
    """`setup`: builds the wheel if none is given, copies it to all workers and installs it there,
    or updates it.

    The TPU runtimes have Python 3.10. uv installs the 3.11 that this project needs, and removes the
    other back end.
    """
    wheel = options.wheel
    if wheel is None:
        source = Path(__file__).parents[2]
        if not (source / "setup.py").is_file():
            raise ConfigError(
                f"{source} has no source tree to build a wheel from; give one with --wheel FILE"
            )
        wheel = source / "build" / "tpu" / WHEEL
        words = ("--quiet", "--no-deps", f"--wheel-dir={wheel.parent}")
        _run(options, (sys.executable, "-m", "pip", "wheel", *words, str(source)))
    uv = "~/.local/bin/uv"
    steps = (
        f"mkdir -p ~/{FOLDER}",
        f"(test -x {uv} || python3 -m pip install --quiet --user uv)",
        f"{uv} venv --quiet --allow-existing --python 3.11 ~/{FOLDER}/env",
        f"{uv} pip install --quiet --exact --python {PYTHON} --reinstall-package shardset "
        f'"$HOME/{wheel.name}[trainer,{BACKENDS[options.backend][0]}]"',
    )
    _run(options, tpu.command("scp", str(wheel), f"{tpu.name}:", *tpu.internal, "--worker=all"))
    _run(options, tpu.ssh(" && ".join(steps)))


def doctor(tpu: Tpu, options: argparse.Namespace) -> None:
    """`doctor`: on all workers at once, as the devices of a slice start together.

    CloudError if a check failed.
    """
    config = config_flags(options)
    config.config()  # a wrong flag must fail here, not on the workers
    words = [*config.arguments(), *flags(want_images_per_second=options.want_images_per_second)]
    _run(
        options,
        tpu.ssh(f"{environment(options.env)} {PYTHON} -m trainer doctor {shlex.join(words)}"),
    )


def train(tpu: Tpu, options: argparse.Namespace) -> None:
    """`train`: returns when the training is done.

    Raises Preempted if it was asked to stop and has saved.

    The trainer runs in a separate session on each worker, so that it outlives the connection.
    """
    given = config_flags(options)
    for flag, url in addresses_of(given.config()):
        _check_bucket(flag, url)
    program = f"{PYTHON} -m {BACKENDS[options.backend][1]} {shlex.join(given.arguments())}"
    running = "a training runs here already: tpu logs --follow shows it, tpu stop ends it"
    steps = (
        (
            f"if pkill -0 -f -F {PID} trainer 2> /dev/null; then echo {shlex.quote(running)} >&2;"
            " exit 1; fi"
        ),
        f"touch {LOG} && start=$(stat -c %s {LOG}) || exit {NOT_SET_UP}",
        f"{environment(options.env)} setsid {program} >> {LOG} 2>&1 < /dev/null & echo $! > {PID}",
        f"tail -c +$((start + 1)) -f --pid=$! {LOG}; wait $!",
    )
    try:
        code = _run(options, tpu.ssh("; ".join(steps)), passed=PREEMPTED)
    except KeyboardInterrupt as error:
        raise CloudError(
            "interrupted; the training continues: `python -m trainer tpu logs --follow` shows it,"
            " `tpu stop` ends it"
        ) from error
    if code == PREEMPTED:
        raise Preempted(
            f"{tpu.name} was asked to stop, everything is saved; the same command resumes from"
            " there"
        )


def ssh(tpu: Tpu, options: argparse.Namespace) -> None:
    """`ssh`: a shell on one worker, or a command on all of them."""
    _run(
        options,
        tpu.ssh(options.shell_command, options.worker or ("all" if options.shell_command else "0")),
    )


def logs(tpu: Tpu, options: argparse.Namespace) -> None:
    """`logs`: what the trainer printed on each worker.

    The run folder has the same by host, see `merge-logs`.
    """
    follow = "-f " if options.follow else ""
    _run(
        options,
        tpu.ssh(
            f'tail -n {options.lines} {follow}{LOG} | sed -u "s/^/$(hostname): /"', options.worker
        ),
    )


def stop(tpu: Tpu, options: argparse.Namespace) -> None:
    """`stop`: SIGTERM to all trainers, until they have saved.

    The TPU remains, and costs money, until it is deleted.
    """
    wait = f"timeout {STOP_S} tail -f --pid=$(cat {PID}) /dev/null"
    _run(options, tpu.ssh(f"pkill -TERM -f -F {PID} trainer && {wait}"))


def delete(tpu: Tpu, options: argparse.Namespace) -> None:
    """`delete`: lists what remains even if the TPU could not be deleted."""
    _check_bucket("--run-dir", options.run_dir)
    project = flags(project=tpu.project)
    commands: dict[str, Command] = {
        "": (*tpu.command("delete", tpu.name), "--quiet"),
        "TPU VMs in this zone": tpu.command("list"),
        "disks in this zone": (
            "gcloud",
            "compute",
            "disks",
            "list",
            f"--zones={tpu.zone}",
            *project,
        ),
    }
    if options.run_dir is not None:
        folder = options.run_dir.rstrip("/")
        commands["bytes in the run folder"] = (
            "gcloud",
            "storage",
            "du",
            "--summarize",
            folder,
            *project,
        )
    failed = []
    for name, command in commands.items():
        if name:
            print(f"# {name}:", flush=True)
        try:
            _run(options, command)
        except CloudError as error:
            failed.append(str(error))
    if failed:
        raise CloudError("; ".join(failed))


def environment(settings: Sequence[str]) -> str:
    """PJRT_DEVICE=TPU and the settings NAME=VALUE of `--env`, as a shell takes them.

    Raises ConfigError.
    """
    variables = {"PJRT_DEVICE": "TPU"}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"--env {setting!r} is not NAME=VALUE, for example --env LIBTPU_INIT_ARGS=--flag=1"
            )
        if name in REFUSED:
            raise ConfigError(f"--env {setting}: {REFUSED[name]}")
        variables[name] = value
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def _check_bucket(flag: str, url: str | None) -> None:
    if url is not None and bucket_of(url) is None:
        raise ConfigError(
            f"{flag} {url}: expected gs://BUCKET/FOLDER; the workers don't see this machine's files"
        )


def _run(options: argparse.Namespace, command: Command, *, passed: int = 0) -> int:
    """Runs a command, or prints it.

    Returns 0 or `passed`; raises CloudError for any other exit code.
    """
    if options.dry_run:
        print(shlex.join(command), flush=True)
        return 0
    try:
        code = subprocess.run(command).returncode
    except FileNotFoundError as error:
        advice = (
            "not installed, or not on the PATH; get it from"
            " https://cloud.google.com/sdk/docs/install"
        )
        raise CloudError(f"{command[0]} is {advice}") from error
    if code == NOT_SET_UP:
        raise CloudError(
            f"{options.name}: nothing is installed there; run `python -m trainer tpu setup` first"
        )
    if code not in (0, passed):
        raise CloudError(
            f"{' '.join(command[:5])}: ended with code {code}, see above; docs/tpu.md explains the"
            " usual errors"
        )
    return code
