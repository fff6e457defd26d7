"""`python -m trainer tpu VERB`: turns arguments into records, and these into steps of a TPU VM."""

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shardset.errors import ConfigError
from shardset.storage.open import bucket_of, local_folder
from trainer.config import TrainConfig
from trainer.errors import CloudError, Preempted
from trainer.flags import add_config_flags, config_flags
from trainer.record import log_files
from trainer.tpu import commands
from trainer.tpu.commands import TpuNode, TpuRequest
from trainer.tpu.gcloud import DryRunner, ShellRunner, explain_failure, require_success
from trainer.tpu.status import SAVED, CloudState, status_of
from trainer.tpu.vm import SOURCE, TpuVm, TrainingAttempt, advice, check_type

NOT_SET_UP = 127
"""The exit code of a shell for a program that does not exist."""


def register(verbs: Any) -> None:
    """Adds `tpu` and its verbs to the command line of the trainer."""
    top = verbs.add_parser("tpu", help="create, set up, use and delete Cloud TPU VMs by gcloud", allow_abbrev=False)
    verbs_of_tpu = top.add_subparsers(required=True, metavar="VERB")
    queued = "the request stays in the queue: the same command waits for it, `tpu delete` withdraws it"
    create_verb = _verb(verbs_of_tpu, "create", create, "create a TPU VM or a slice and wait until it is ready", queued)
    _add_request(create_verb, required=True)
    setup_verb = _verb(verbs_of_tpu, "setup", setup, "build this project's wheel and install it on all workers")
    setup_verb.add_argument("--wheel", help="wheel to install (default: built from this source tree)")
    _add_backend(setup_verb)
    doctor_verb = _verb(verbs_of_tpu, "doctor", doctor, "run `python -m trainer doctor` on all workers at once")
    doctor_verb.add_argument("--want-images-per-second", metavar="N", help="the rate that the whole run should read at")
    goes_on = "a training on the workers goes on: the same command joins it, `tpu stop` ends it"
    train_verb = _verb(
        verbs_of_tpu, "train", train, "train on all workers, or join the training that runs on them", goes_on
    )
    _add_request(train_verb, required=False)
    train_verb.add_argument("--wheel", help="wheel to install on a TPU that this command creates")
    _add_backend(train_verb)
    train_verb.add_argument(
        "--max-restarts", type=_count, default=0, metavar="N",
        help="create, set up and train again after preemptions, at most N times (default: 0); needs --accelerator-type",
    )  # fmt: skip
    for verb in (doctor_verb, train_verb):
        verb.add_argument(
            "--env",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="set an environment variable on the workers",
        )
        add_config_flags(verb)
    logs_verb = _verb(
        verbs_of_tpu, "logs", logs, "fetch the logs of all workers, merge them by time, copy them to the bucket"
    )
    logs_verb.add_argument("--to", default="tpu-logs", metavar="FOLDER", help="local folder for the logs")
    logs_verb.add_argument("--run-dir", help="run folder in gs://; without it nothing is uploaded")
    _verb(verbs_of_tpu, "stop", stop, "ask the trainer on all workers to save and end")
    delete_verb = _verb(verbs_of_tpu, "delete", delete, "delete the TPU, then list what remains and costs money")
    delete_verb.add_argument("--run-dir", help="run folder in gs://, to show its size")


def _verb(
    verbs: Any,
    name: str,
    command: Callable[[argparse.Namespace], None],
    text: str,
    left: str = "the same command does what is left",
) -> argparse.ArgumentParser:
    """A verb with the common flags. `left` tells the user what a Ctrl-C leaves to do."""
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    verb.add_argument("name", help="name of the TPU VM, and of its queued request")
    verb.add_argument("--zone", required=True, help="zone, for example us-central2-b")
    verb.add_argument("--project", help="project (default: the one that gcloud is configured for)")
    verb.add_argument(
        "--internal-ips", action="store_true", help="no external addresses; reach it from its own network"
    )
    verb.add_argument("--dry-run", action="store_true", help="only print the commands")
    verb.add_argument(
        "--poll-seconds", type=_seconds, default=20.0, metavar="S", help="seconds between two checks of its state"
    )
    verb.add_argument("--debug", action="store_true", help="show tracebacks")
    verb.set_defaults(command=partial(_interruptible, command, left))
    return verb


def _interruptible(command: Callable[[argparse.Namespace], None], left: str, options: argparse.Namespace) -> None:
    try:
        command(options)
    except KeyboardInterrupt as error:
        raise CloudError(f"interrupted; {left}") from error


def _add_request(verb: argparse.ArgumentParser, *, required: bool) -> None:
    verb.add_argument(
        "--accelerator-type", required=required, help="type, for example v4-32, v5litepod-16 (v5e), v3-32"
    )
    verb.add_argument("--runtime-version", help="default: Google's choice for PyTorch on that generation")
    verb.add_argument("--direct", action="store_true", help="create it at once or fail, instead of queueing a request")
    verb.add_argument("--spot", action="store_true", help="cheaper, and may be preempted at any time")
    verb.add_argument("--valid-for", help="give up a queued request after this time, such as 6h")
    verb.add_argument("--startup-script", metavar="FILE", help="script that every worker runs when it boots")
    verb.add_argument("--network", help="default: the network named default")
    verb.add_argument("--subnetwork", help="of that network, in the zone's region")
    verb.add_argument("--service-account", help="e-mail; default: the one of Compute Engine")


def _add_backend(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--backend",
        choices=sorted(commands.BACKENDS),
        default="xla",
        help="back end to install: xla (torch_xla) or torchtpu, which never ran on a TPU here (default: xla)",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, such as 20")
    return float(text)


# --- verbs -----------------------------------------------------------------------------------------------------------


def create(options: argparse.Namespace) -> None:
    """`create`: waits for a request that exists already. Does nothing if the TPU is ready."""
    vm = _vm(options, exists=False)
    request = _request(options)
    state = vm.wait_while_ending()
    status = status_of(state)
    if status in ("unusable", "stopped"):
        raise CloudError(f"{vm.node.name}: {state.text}; {advice(vm.node, status)}")
    check_type(state, request)
    if status == "absent":
        vm.request_creation(request)
    if status == "ready":
        vm.runner.log(f"{vm.node.name} is READY already: nothing to do")
        return
    vm.wait_until_ready()


def setup(options: argparse.Namespace) -> None:
    """`setup`: also brings an existing setup up to date."""
    vm = _vm(options)
    wheel = _wheel(options.wheel)
    if not options.dry_run:
        vm.require_ready()
    vm.install(wheel)


def doctor(options: argparse.Namespace) -> None:
    """`doctor`: raises CloudError if a worker failed a check."""
    flags = config_flags(options)
    flags.config()  # a wrong flag must fail here, not on the workers
    environment = commands.environment_of(options.env)
    vm = _vm(options)
    arguments = flags.arguments()
    if options.want_images_per_second is not None:
        arguments.append(f"--want-images-per-second={options.want_images_per_second}")
    result = vm.runner.follow(commands.doctor(vm.node, arguments, environment))
    if result.code == NOT_SET_UP:
        raise CloudError(f"{vm.node.name}: nothing is installed there; run `python -m trainer tpu setup` first")
    # gcloud marks its own errors in this way. Without one, the code is that of the doctor on a worker.
    if result.code == 1 and "ERROR: (" not in result.errors:
        raise CloudError(f"{vm.node.name}: a worker failed a check, see above")
    require_success(result)


def train(options: argparse.Namespace) -> None:
    """`train`: returns when the training is done. Raises Preempted or CloudError if it ends in any other way."""
    flags = config_flags(options)
    _check_urls(flags.config())
    request = None if options.accelerator_type is None else _request(options)
    if options.max_restarts and request is None:
        raise ConfigError("--max-restarts needs to know what to create again; give --accelerator-type and its options")
    wheel = _wheel(options.wheel) if request is not None else None
    vm = _vm(options)
    command = commands.train(vm.node, flags.arguments(), commands.environment_of(options.env))
    if options.dry_run and request is not None:
        _show_restart(vm, request, wheel, options.max_restarts)
    for left in range(options.max_restarts, -1, -1):
        attempt = vm.train_once(command, request, wheel)
        if attempt.outcome != "retry":
            break
        vm.runner.log(f"interrupted ({attempt.result.code}, {attempt.state.text}); {left} restarts left")
    _conclude(vm, attempt)


def _show_restart(vm: TpuVm, request: TpuRequest, wheel: Path | None, max_restarts: int) -> None:
    vm.runner.comment(f"if {vm.node.name} is absent, or preempted and deleted (at most {max_restarts} times):")
    vm.delete(CloudState(node="PREEMPTED", request="SUSPENDED" if request.queued else None))
    vm.request_creation(request)
    vm.install(wheel)
    vm.runner.comment("in any case:")


def _conclude(vm: TpuVm, attempt: TrainingAttempt) -> None:
    """Returns if the training is done. Otherwise raises an error that says how it ended."""
    name, code = vm.node.name, attempt.result.code
    if attempt.outcome == "done":
        vm.runner.log(f"training is done; {name} costs money until `python -m trainer tpu delete`")
    elif attempt.outcome == "stopped":
        raise Preempted("stopped by `tpu stop`, everything is saved; the same command goes on from there")
    elif attempt.outcome == "retry" and code == SAVED:
        raise Preempted(f"{name} was asked to stop, everything is saved; the same command goes on from there")
    elif attempt.outcome == "retry":
        raise CloudError(
            f"{name}: {attempt.state.text}, and no restarts are left; the run folder has the last checkpoint, from "
            "which the same command goes on, with --accelerator-type on a TPU that it creates again"
        )
    elif code == NOT_SET_UP:
        raise CloudError(f"{name}: nothing is installed there; run `python -m trainer tpu setup` first")
    elif attempt.outcome == "unreachable" or "ERROR: (" in attempt.result.errors:
        raise CloudError(explain_failure(attempt.result))
    else:
        raise CloudError(f"{name}: the trainer of a worker ended with code {code}; its last lines above say why")


def logs(options: argparse.Namespace) -> None:
    """`logs`: writes FOLDER/0.log, 1.log ... and merged.log."""
    if options.run_dir is not None:
        commands.bucket_url(options.run_dir)
    folder = local_folder(options.to, "--to")
    vm = _vm(options)
    state = vm.require_ready()
    files = [folder / f"{worker}.log" for worker in range(max(1, state.num_workers))]
    if not options.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    for worker, file in enumerate(files):
        require_success(vm.runner.follow(commands.fetch_log(vm.node, worker, file)))
    merged = folder / "merged.log"
    if not options.dry_run:
        merged.write_text("".join(f"{line}\n" for line in merged_lines(files)))
    vm.runner.log(f"{len(files)} logs in {folder}; by time in {merged}")
    if options.run_dir is not None:
        require_success(vm.runner.follow(commands.upload_logs([*files, merged], options.run_dir, options.project)))


def stop(options: argparse.Namespace) -> None:
    """`stop`: the TPU remains, and costs money, until it is deleted."""
    vm = _vm(options)
    require_success(vm.runner.follow(commands.stop(vm.node)))
    vm.runner.log(f"{vm.node.name} is still there and costs money: delete it with `python -m trainer tpu delete`")


def delete(options: argparse.Namespace) -> None:
    """`delete`: deletes the TPU, if there is one, and lists what remains."""
    if options.run_dir is not None:
        commands.bucket_url(options.run_dir)
    vm = _vm(options)
    state = vm.state()
    if status_of(state) == "absent":
        vm.runner.log(f"{vm.node.name} is not there: nothing to delete")
    else:
        vm.delete(state)
    unknown = []
    for name, command in commands.remaining(vm.node, options.run_dir).items():
        vm.runner.comment(f"{name}:")
        result = vm.runner.capture(command)
        vm.runner.log(result.output.strip() or ("none" if result.code == 0 else f"unknown: {explain_failure(result)}"))
        unknown += [name] if result.code else []
    vm.runner.log("everything in this list costs money until it is deleted")
    if unknown:
        raise CloudError(f"it is not known what remains of: {', '.join(unknown)}; see above")


# --- arguments as records --------------------------------------------------------------------------------------------


def _wheel(path: str | None) -> Path | None:
    """The given wheel; None to build one. Raises ConfigError if neither is possible."""
    if path is None and not (SOURCE / "setup.py").is_file():
        raise ConfigError(f"{SOURCE} holds no source tree to build a wheel from; give one with --wheel FILE")
    if path is not None and not (path.endswith(".whl") and Path(path).is_file()):
        raise ConfigError(f"--wheel {path}: expected a wheel of this project, such as dist/{commands.WHEEL}")
    return None if path is None else Path(path)


def _check_urls(config: TrainConfig) -> None:
    """Raises ConfigError unless shard set, run folder and checkpoint are in a bucket."""
    resumed = None if config.resume in ("auto", "never") else config.resume
    for flag, url in (("--run-dir", config.run_dir), ("--manifest", config.manifest), ("--resume", resumed)):
        if url is not None and bucket_of(url) is None:
            raise ConfigError(f"{flag} {url}: expected gs://BUCKET/FOLDER; the workers don't see this machine's files")


def _vm(options: argparse.Namespace, *, exists: bool = True) -> TpuVm:
    runner = DryRunner(exists=exists) if options.dry_run else ShellRunner()
    pause_s = 0 if options.dry_run else options.poll_seconds
    backend = getattr(options, "backend", "xla")  # only some verbs install
    return TpuVm(node=_node(options), runner=runner, pause=lambda: time.sleep(pause_s), backend=backend)


def _node(options: argparse.Namespace) -> TpuNode:
    return TpuNode(name=options.name, zone=options.zone, project=options.project, internal_ip=options.internal_ips)


def _request(options: argparse.Namespace) -> TpuRequest:
    return TpuRequest(
        node=_node(options),
        accelerator_type=options.accelerator_type,
        runtime_version=options.runtime_version,
        queued=not options.direct,
        spot=options.spot,
        valid_for=options.valid_for,
        startup_script=options.startup_script,
        network=options.network,
        subnetwork=options.subnetwork,
        service_account=options.service_account,
    )


def merged_lines(files: Iterable[Path]) -> Iterator[str]:
    """The lines of all workers' logs by time, each as `TIME worker-0 TEXT`."""
    return log_files.merged((f"worker-{file.stem}", file.read_text(errors="replace")) for file in files)
