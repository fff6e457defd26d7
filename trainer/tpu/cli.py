"""`python -m trainer tpu VERB`: one gcloud command for each verb, run or printed."""

import argparse
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardset.errors import ConfigError
from shardset.program import PREEMPTED
from shardset.storage.open import bucket_of
from trainer.errors import CloudError, Preempted
from trainer.flags import add_config_flags, config_flags
from trainer.tpu import commands
from trainer.tpu.commands import BACKENDS, Command, Tpu

GCLOUD_FLAGS = ("network", "subnetwork", "service_account")


def register(verbs: Any) -> None:
    """Adds `tpu` and its verbs to the command line of the trainer."""
    top = verbs.add_parser("tpu", help="create, set up, use and delete Cloud TPU VMs by gcloud", allow_abbrev=False)
    verbs_of_tpu = top.add_subparsers(required=True, metavar="VERB")

    def add(name: str, command: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        verb: argparse.ArgumentParser = verbs_of_tpu.add_parser(name, help=text, description=text, allow_abbrev=False)
        verb.add_argument("name", help="name of the TPU VM")
        verb.add_argument("--zone", required=True, help="zone, for example us-central2-b")
        verb.add_argument("--project", help="project (default: the one that gcloud is configured for)")
        verb.add_argument(
            "--internal-ips", action="store_true", help="no external addresses; reach it from its network"
        )
        verb.add_argument("--dry-run", action="store_true", help="only print the commands")
        verb.add_argument("--debug", action="store_true", help="show tracebacks")
        verb.set_defaults(command=command)
        return verb

    verb = add("create", create, "create a TPU VM or a slice")
    verb.add_argument("--accelerator-type", required=True, help="type, for example v4-32, v5litepod-16 (v5e), v3-32")
    verb.add_argument("--runtime-version", help="default: Google's choice for PyTorch on that generation")
    verb.add_argument("--spot", action="store_true", help="cheaper, and may be preempted at any time")
    for flag in GCLOUD_FLAGS:
        verb.add_argument(f"--{flag.replace('_', '-')}", help="as in gcloud")

    verb = add("setup", setup, "build this project's wheel and install it on all workers")
    verb.add_argument("--wheel", type=Path, help="wheel to install (default: built from this source tree)")
    _add_backend(verb)

    verb = add("doctor", doctor, "run `python -m trainer doctor` on all workers at once")
    verb.add_argument("--want-images-per-second", metavar="N", help="the rate that the whole run should read at")
    _add_config(verb)
    verb = add("train", train, "run `python -m trainer train` on all workers and print their output")
    _add_backend(verb)
    _add_config(verb)

    verb = add("ssh", ssh, "open a shell on a worker, or run a command on all of them")
    verb.add_argument("--worker", help="number of a worker, or all (default: 0 for a shell, all for --command)")
    verb.add_argument("--command", dest="shell_command", help="shell command to run")
    verb = add("logs", logs, "print the logs of all workers")
    verb.add_argument("--worker", default="all", help="number of a worker (default: all)")
    verb.add_argument("--lines", type=int, default=1000, help="last lines of each (default: 1000)")
    verb.add_argument("--follow", action="store_true", help="go on with new lines until Ctrl-C")
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


def create(options: argparse.Namespace) -> None:
    """`create`: returns when the TPU is ready. Raises CloudError if there is none."""
    given = {flag: getattr(options, flag) for flag in GCLOUD_FLAGS}
    type_, version = options.accelerator_type, options.runtime_version
    _run(options, commands.create(_tpu(options), type_, version, spot=options.spot, **given))


def setup(options: argparse.Namespace) -> None:
    """`setup`: also brings an existing setup up to date."""
    for command in commands.setup(_tpu(options), options.wheel, options.backend):
        _run(options, command)


def doctor(options: argparse.Namespace) -> None:
    """`doctor`: raises CloudError if a worker failed a check."""
    wanted = Tpu.flags(want_images_per_second=options.want_images_per_second)
    flags = config_flags(options)
    flags.config()  # a wrong flag must fail here, not on the workers
    environment = commands.environment(options.env)
    _run(options, commands.doctor(_tpu(options), environment, [*flags.arguments(), *wanted]))


def train(options: argparse.Namespace) -> None:
    """`train`: returns when the training is done. Raises Preempted if it was asked to stop and has saved."""
    flags = config_flags(options)
    config = flags.config()
    resumed = None if config.resume in ("auto", "never") else config.resume
    for flag, url in (("--run-dir", config.run_dir), ("--manifest", config.manifest), ("--resume", resumed)):
        _check_bucket(flag, url)
    environment = commands.environment(options.env)
    try:
        _run(options, commands.train(_tpu(options), environment, flags.arguments(), options.backend))
    except KeyboardInterrupt as error:
        raise CloudError(
            "interrupted; the training continues: `python -m trainer tpu logs --follow` shows it, `tpu stop` ends it"
        ) from error


def ssh(options: argparse.Namespace) -> None:
    """`ssh`: a shell on one worker, or a command on all of them."""
    worker = options.worker or ("all" if options.shell_command else "0")
    _run(options, _tpu(options).ssh(options.shell_command, worker))


def logs(options: argparse.Namespace) -> None:
    """`logs`: what the trainer printed on each worker. The run folder has the same by host, see `merge-logs`."""
    _run(options, commands.logs(_tpu(options), options.worker, str(options.lines), follow=options.follow))


def stop(options: argparse.Namespace) -> None:
    """`stop`: the TPU remains, and costs money, until it is deleted."""
    _run(options, commands.stop(_tpu(options)))


def delete(options: argparse.Namespace) -> None:
    """`delete`: lists what remains even if the TPU could not be deleted."""
    _check_bucket("--run-dir", options.run_dir)
    tpu, failed = _tpu(options), []
    for name, command in {"": commands.delete(tpu), **commands.remaining(tpu, options.run_dir)}.items():
        if name:
            print(f"# {name}:", flush=True)
        try:
            _run(options, command)
        except CloudError as error:
            failed.append(str(error))
    if failed:
        raise CloudError("; ".join(failed))


def _check_bucket(flag: str, url: str | None) -> None:
    if url is not None and bucket_of(url) is None:
        raise ConfigError(f"{flag} {url}: expected gs://BUCKET/FOLDER; the workers don't see this machine's files")


def _tpu(options: argparse.Namespace) -> Tpu:
    return Tpu(name=options.name, zone=options.zone, project=options.project, internal_ips=options.internal_ips)


def _run(options: argparse.Namespace, command: Command) -> None:
    """Runs a command, or prints it. Raises CloudError, or Preempted for the trainer's code of that name."""
    if options.dry_run:
        print(shlex.join(command), flush=True)
        return
    try:
        code = subprocess.run(command).returncode
    except FileNotFoundError as error:
        advice = "not installed, or not on the PATH; get it from https://cloud.google.com/sdk/docs/install"
        raise CloudError(f"{command[0]} is {advice}") from error
    if code == PREEMPTED and options.command is train:
        raise Preempted(f"{options.name} was asked to stop, everything is saved; the same command resumes from there")
    if code == commands.NOT_SET_UP:
        raise CloudError(f"{options.name}: nothing is installed there; run `python -m trainer tpu setup` first")
    if code:
        raise CloudError(
            f"{' '.join(command[:5])}: ended with code {code}, see above; docs/tpu.md explains the usual errors"
        )
