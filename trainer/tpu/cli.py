"""`python -m trainer tpu create|setup|doctor|train|logs|stop|delete`: arguments -> commands -> what follows."""

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardset.errors import ConfigError
from shardset.storage.local_folder import local_folder
from trainer.config import TrainConfig
from trainer.errors import CloudError, Preempted
from trainer.flags import add_config_flags, config_flags
from trainer.record import merge_logs
from trainer.tpu import commands
from trainer.tpu.commands import Node, Request, Words
from trainer.tpu.gcloud import Done, DryRun, Failed, Runner, Shell, checked, explained
from trainer.tpu.status import (
    SAVED,
    STOPPED,
    UNREACHABLE,
    CloudState,
    Standing,
    Verdict,
    seen,
    standing,
    verdict,
    was_taken_away,
)

SOURCE = Path(__file__).parents[2]
NUM_LOOKS = 4
"""How often to look whether a TPU is being taken away, after a training that ended badly."""

NOT_SET_UP = 127
"""What a shell says where there is no such program."""


def register(verbs: Any) -> None:
    """Adds `tpu` and its verbs to the command line of the trainer."""
    top = verbs.add_parser("tpu", help="create, set up, use and delete Cloud TPU VMs by gcloud", allow_abbrev=False)
    inner = top.add_subparsers(required=True, metavar="VERB")
    queued = "what was asked for stays asked for: the same command waits for it, `tpu delete` withdraws it"
    made = _verb(inner, "create", create, "ask for a TPU VM or a slice and wait until it is ready", queued)
    _add_request(made, required=True)
    setup_verb = _verb(inner, "setup", setup, "build this project's wheel and install it on all workers")
    setup_verb.add_argument("--wheel", help="a wheel to install instead of one built from this source tree")
    doctor_verb = _verb(inner, "doctor", doctor, "run `python -m trainer doctor` on all workers at once")
    doctor_verb.add_argument("--want-images-per-second", metavar="N", help="what the whole run is to read")
    goes_on = "a training that runs there goes on: the same command joins it, `tpu stop` ends it"
    train_verb = _verb(inner, "train", train, "train on all workers, or join the training that runs there", goes_on)
    _add_request(train_verb, required=False)
    train_verb.add_argument("--wheel", help="what to install on a TPU that is created again")
    train_verb.add_argument(
        "--max-restarts", type=_count, default=0, metavar="N",
        help="create, set up and train again after preemptions, at most N times (default: 0); needs --accelerator-type",
    )  # fmt: skip
    for verb in (doctor_verb, train_verb):
        verb.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable there")
        add_config_flags(verb)
    logs_verb = _verb(inner, "logs", logs, "fetch the logs of all workers, merge them by time, copy them to the bucket")
    logs_verb.add_argument("--to", default="tpu-logs", metavar="FOLDER", help="where to put them here")
    logs_verb.add_argument("--run-dir", help="the run folder in gs://; without it nothing is uploaded")
    _verb(inner, "stop", stop, "ask the trainer on all workers to save and end")
    delete_verb = _verb(inner, "delete", delete, "delete the TPU, then list what remains and costs money")
    delete_verb.add_argument("--run-dir", help="the run folder in gs://, to say how much is in it")


def _verb(
    verbs: Any,
    name: str,
    command: Callable[[argparse.Namespace], None],
    text: str,
    left: str = "the same command does what is left",
) -> argparse.ArgumentParser:
    """A verb with the flags that all have; `left` is what an interruption leaves behind."""
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    verb.add_argument("name", help="of the TPU VM, and of its queued request")
    verb.add_argument("--zone", required=True, help="for example us-central2-b")
    verb.add_argument("--project", help="default: the one that gcloud is configured for")
    verb.add_argument("--internal-ips", action="store_true", help="no external addresses; reached from its own network")
    verb.add_argument("--dry-run", action="store_true", help="only print the commands")
    verb.add_argument("--poll-seconds", type=_seconds, default=20.0, metavar="S", help="between two looks at its state")
    verb.add_argument("--debug", action="store_true", help="show tracebacks")
    verb.set_defaults(command=partial(_interruptible, command, left))
    return verb


def _interruptible(command: Callable[[argparse.Namespace], None], left: str, options: argparse.Namespace) -> None:
    try:
        command(options)
    except KeyboardInterrupt as error:
        raise CloudError(f"interrupted; {left}") from error


def _add_request(verb: argparse.ArgumentParser, *, required: bool) -> None:
    verb.add_argument("--accelerator-type", required=required, help="for example v4-32, v5litepod-16 (v5e), v3-32")
    verb.add_argument("--runtime-version", help="default: Google's choice for PyTorch on that generation")
    verb.add_argument("--direct", action="store_true", help="get it at once or fail, instead of a queued request")
    verb.add_argument("--spot", action="store_true", help="cheaper, and may be taken away at any time")
    verb.add_argument("--valid-for", help="give up a queued request after this time, such as 6h")
    verb.add_argument("--startup-script", metavar="FILE", help="runs on every worker when it boots")
    verb.add_argument("--network", help="default: the network named default")
    verb.add_argument("--subnetwork", help="of that network, in the zone's region")
    verb.add_argument("--service-account", help="e-mail; default: the one of Compute Engine")


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
    """`create`: nothing to do where it is ready; goes on waiting where it is asked for already."""
    work = _work(options, is_there=False)
    request = _request(options)
    found = work.wait_until_left()
    now = standing(found)
    if now in ("gone", "stopped"):
        raise CloudError(f"{work.node.name}: {found.text}; {_advice(work.node, now)}")
    check_type(found, request)
    if now == "absent":
        work.ask(request)
    if now == "ready":
        work.runner.say(f"{work.node.name} is READY already: nothing to do")
        return
    work.wait_until_ready()


def setup(options: argparse.Namespace) -> None:
    """`setup`: the same again brings it up to date."""
    work = _work(options)
    wheel = _wheel(options.wheel)
    if not options.dry_run:
        work.need_ready()
    work.set_up(wheel)


def doctor(options: argparse.Namespace) -> None:
    """`doctor`: raises CloudError if a worker failed a check."""
    flags = config_flags(options)
    flags.config()  # so that a wrong flag fails here, not on the workers
    environment = commands.environment_of(options.env)
    work = _work(options)
    words = flags.arguments()
    if options.want_images_per_second is not None:
        words.append(f"--want-images-per-second={options.want_images_per_second}")
    done = work.runner.follow(commands.doctor(work.node, words, environment))
    if done.code == NOT_SET_UP:
        raise CloudError(f"{work.node.name}: nothing is installed there; run `python -m trainer tpu setup` first")
    if done.code == 1 and "ERROR: (" not in done.errors:
        raise CloudError(f"{work.node.name}: a worker failed a check, see above")
    checked(done)


def train(options: argparse.Namespace) -> None:
    """`train`: until it is done, stopped by `tpu stop`, failed, or preempted too often."""
    flags = config_flags(options)
    _check_places(flags.config())
    request = None if options.accelerator_type is None else _request(options)
    if options.max_restarts and request is None:
        raise ConfigError("--max-restarts has to know what to create again; give --accelerator-type and its options")
    wheel = _wheel(options.wheel) if request is not None else None
    work = _work(options)
    command = commands.train(work.node, flags.arguments(), commands.environment_of(options.env))
    if options.dry_run and request is not None:
        _show_restart(work, request, wheel, options.max_restarts)
    for left in range(options.max_restarts, -1, -1):
        ended = work.attempt(command, request, wheel)
        if ended.verdict != "again":
            break
        work.runner.say(f"interrupted ({ended.done.code}, {ended.found.text}); {left} restarts left")
    _conclude(work, ended)


def _show_restart(work: "Work", request: Request, wheel: Path | None, max_restarts: int) -> None:
    work.runner.head(f"if {work.node.name} is absent, or preempted and deleted (at most {max_restarts} times):")
    work.remove(CloudState(node="PREEMPTED", request="SUSPENDED" if request.queued else None))
    work.ask(request)
    work.set_up(wheel)
    work.runner.head("in any case:")


def _conclude(work: "Work", ended: "Ended") -> None:
    """Returns if the training is done; raises what it ended with otherwise."""
    name, code = work.node.name, ended.done.code
    if ended.verdict == "done":
        work.runner.say(f"training is done; {name} costs money until `python -m trainer tpu delete`")
    elif ended.verdict == "stopped":
        raise Preempted("stopped by `tpu stop`, everything is saved; the same command goes on from there")
    elif ended.verdict == "again" and code == SAVED:
        raise Preempted(f"{name} was asked to stop, everything is saved; the same command goes on from there")
    elif ended.verdict == "again":
        raise CloudError(
            f"{name}: {ended.found.text}, and no restarts are left; the run folder has the last checkpoint, from "
            "which the same command goes on, with --accelerator-type on a TPU that it creates again"
        )
    elif code == NOT_SET_UP:
        raise CloudError(f"{name}: nothing is installed there; run `python -m trainer tpu setup` first")
    elif ended.verdict == "unreachable" or "ERROR: (" in ended.done.errors:
        raise CloudError(explained(ended.done))
    else:
        raise CloudError(f"{name}: the trainer of a worker ended with code {code}; its last lines above say why")


def logs(options: argparse.Namespace) -> None:
    """`logs`: FOLDER/0.log, 1.log ... and merged.log."""
    if options.run_dir is not None:
        commands.bucket_url(options.run_dir)
    folder = local_folder(options.to, "--to")
    work = _work(options)
    found = work.need_ready()
    files = [folder / f"{worker}.log" for worker in range(max(1, found.num_workers))]
    if not options.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    for worker, file in enumerate(files):
        checked(work.runner.follow(commands.fetch_log(work.node, worker, file)))
    merged = folder / "merged.log"
    if not options.dry_run:
        merged.write_text("".join(f"{line}\n" for line in merged_lines(files)))
    work.runner.say(f"{len(files)} logs in {folder}; by time in {merged}")
    if options.run_dir is not None:
        checked(work.runner.follow(commands.upload_logs([*files, merged], options.run_dir, options.project)))


def stop(options: argparse.Namespace) -> None:
    """`stop`: the TPU stays, and costs money, until it is deleted."""
    work = _work(options)
    checked(work.runner.follow(commands.stop(work.node)))
    work.runner.say(f"{work.node.name} is still there and costs money: delete it with `python -m trainer tpu delete`")


def delete(options: argparse.Namespace) -> None:
    """`delete`: says so where there is nothing to delete."""
    if options.run_dir is not None:
        commands.bucket_url(options.run_dir)
    work = _work(options)
    found = work.look()
    if standing(found) == "absent":
        work.runner.say(f"{work.node.name} is not there: nothing to delete")
    else:
        work.remove(found)
    unknown = []
    for name, words in commands.remaining(work.node, options.run_dir).items():
        work.runner.head(f"{name}:")
        done = work.runner.capture(words)
        work.runner.say(done.output.strip() or ("none" if done.code == 0 else f"unknown: {explained(done)}"))
        unknown += [name] if done.code else []
    work.runner.say("what is listed above goes on costing money until it is deleted")
    if unknown:
        raise CloudError(f"it is not known what remains of: {', '.join(unknown)}; see above")


# --- steps -----------------------------------------------------------------------------------------------------------


class Lost(CloudError):
    """What was waited for can't become ready any more."""

    def __init__(self, text: str, found: CloudState) -> None:
        super().__init__(text)
        self.found = found


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The steps that verbs are made of."""

    node: Node
    runner: Runner
    pause: Callable[[], None]

    def look(self) -> CloudState:
        """What is there now."""
        # In this order: of an active request, the TPU VM is there.
        request = self.runner.capture(commands.describe_request(self.node))
        vm = self.runner.capture(commands.describe(self.node))
        return seen(_described(vm), _described(request))

    def need_ready(self) -> CloudState:
        """What is there; raises CloudError unless it is ready."""
        found = self.look()
        if standing(found) != "ready":
            raise CloudError(f"{self.node.name}: {found.text}; {_advice(self.node, standing(found))}")
        return found

    def wait_until_ready(self) -> None:
        """Returns when it is ready; raises CloudError when it can't become so any more."""
        told = ""
        while True:
            found = self.look()
            now = standing(found)
            if now == "ready":
                self.runner.say(f"{self.node.name} is READY, {found.num_workers or 1} workers")
                return
            if now in ("gone", "stopped", "absent"):
                raise Lost(f"{self.node.name}: {found.text}; {_advice(self.node, now)}", found)
            if told != found.text:
                told = found.text
                self.runner.say(f"waiting for {self.node.name}: {told}; Ctrl-C leaves the request in the queue")
            self.pause()

    def wait_until_left(self) -> CloudState:
        """What is there when nothing is on its way out any more."""
        while standing(found := self.look()) == "leaving":
            self.pause()
        return found

    def ask(self, request: Request) -> None:
        """Asks for it."""
        checked(self.runner.follow(commands.create(request)))

    def set_up(self, wheel: Path | None) -> None:
        """Installs the wheel on all workers; one built from this source tree if None."""
        if wheel is None:
            wheel = SOURCE / "build" / "tpu" / commands.WHEEL
            checked(self.runner.follow(commands.build_wheel(SOURCE, wheel.parent)))
        checked(self.runner.follow(commands.copy_wheel(self.node, wheel)))
        checked(self.runner.follow(commands.install(self.node, wheel.name)))

    def remove(self, found: CloudState) -> None:
        """Deletes the queued request with its TPU VM, or the TPU VM alone if it was created directly."""
        words = commands.delete(self.node) if found.request is None else commands.delete_request(self.node)
        done = self.runner.follow(words)
        if not done.is_absent:
            checked(done)

    def make_ready(self, request: Request, wheel: Path | None) -> None:
        """Creates it again if it is gone, and sets it up; does nothing if it is ready."""
        found = self.wait_until_left()
        now = standing(found)
        check_type(found, request)
        if now == "ready":
            return
        if now == "gone":
            self.remove(found)
        if now in ("gone", "absent"):
            self.ask(request)
        self.wait_until_ready()
        self.set_up(wheel)

    def attempt(self, command: Words, request: Request | None, wheel: Path | None) -> "Ended":
        """One training, with `request` on a TPU that is created and set up where needed."""
        done = self._prepared(request, wheel)
        if done is None:
            done = self.runner.follow(command)
        found = self._settled(done.code)
        return Ended(done=done, found=found, verdict=verdict(done.code, standing(found)))

    def _prepared(self, request: Request | None, wheel: Path | None) -> Done | None:
        """None when it is ready; else the command of the setup that failed because it was taken away meanwhile."""
        if request is None:
            return None
        try:
            self.make_ready(request, wheel)
        except Lost as error:
            if not was_taken_away(error.found):
                raise
            return Done(words=commands.create(request), code=UNREACHABLE, errors=str(error))
        except Failed as error:
            if standing(self.look()) not in ("gone", "leaving"):
                raise
            return error.done
        return None

    def _settled(self, code: int) -> CloudState:
        """What is there after a command that ended with `code`: a preemption shows a little later."""
        found = self.look()
        for _ in range(NUM_LOOKS if code not in (0, SAVED, STOPPED) else 0):
            if standing(found) != "ready":
                break
            self.pause()
            found = self.look()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a training ended: the command, what was there afterwards, and what follows."""

    done: Done
    found: CloudState
    verdict: Verdict


def merged_lines(files: Iterable[Path]) -> Iterator[str]:
    """The lines of all workers' logs by time, each as `TIME worker-0 TEXT`."""
    return merge_logs.merged((f"worker-{file.stem}", file.read_text(errors="replace")) for file in files)


def check_type(found: CloudState, request: Request) -> None:
    """Raises ConfigError if another type than the wanted one is there."""
    if found.accelerator_type not in (None, request.accelerator_type):
        raise ConfigError(
            f"{request.node.name} is there as {found.accelerator_type}, {request.accelerator_type} was asked for; "
            "choose another name, or delete it first"
        )


def _described(done: Done) -> str | None:
    return None if done.is_absent else checked(done).output


def _advice(node: Node, now: Standing) -> str:
    start = commands.shown(("gcloud", "compute", "tpus", "tpu-vm", "start", node.name, f"--zone={node.zone}"))
    return {
        "absent": "create it with `python -m trainer tpu create`",
        "coming": "`python -m trainer tpu create` waits until it is ready",
        "leaving": "wait until it has gone, then create it again",
        "stopped": f"start it with `{start}`, or delete it",
        "gone": "it can't be used any more: `python -m trainer tpu delete` it, then create it again",
        "ready": "it is ready",
    }[now]


def _wheel(path: str | None) -> Path | None:
    """The wheel that was given, or None to build one; raises ConfigError where neither can be had."""
    if path is None and not (SOURCE / "setup.py").is_file():
        raise ConfigError(f"{SOURCE} holds no source tree to build a wheel from; give one with --wheel FILE")
    if path is not None and not (path.endswith(".whl") and Path(path).is_file()):
        raise ConfigError(f"--wheel {path}: expected a wheel of this project, such as dist/{commands.WHEEL}")
    return None if path is None else Path(path)


def _check_places(config: TrainConfig) -> None:
    """Raises ConfigError unless the workers find data, run folder and the checkpoint to go on from in a bucket."""
    resumed = None if config.resume in ("auto", "never") else config.resume
    for flag, url in (("--run-dir", config.run_dir), ("--manifest", config.manifest), ("--resume", resumed)):
        if url is not None and not url.startswith("gs://"):
            raise ConfigError(f"{flag} {url}: expected gs://BUCKET/FOLDER; the workers don't see this machine's files")


def _work(options: argparse.Namespace, *, is_there: bool = True) -> Work:
    runner = DryRun(is_there=is_there) if options.dry_run else Shell()
    pause_s = 0 if options.dry_run else options.poll_seconds
    return Work(node=_node(options), runner=runner, pause=lambda: time.sleep(pause_s))


def _node(options: argparse.Namespace) -> Node:
    return Node(
        name=options.name, zone=options.zone, project=options.project, internal_ip=options.internal_ips
    )  # fmt: skip


def _request(options: argparse.Namespace) -> Request:
    return Request(
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
