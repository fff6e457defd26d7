"""`python -m trainer train|evaluate|bench-input|doctor|merge-logs|tpu`: arguments -> config -> one call."""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardset.errors import ConfigError, NotFound, ShardsetError
from shardset.program import OK, PREEMPTED, program_parser, run_program, run_verb
from shardset.storage.open import is_address, open_storage
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.errors import Preempted
from trainer.record import checkpoint_names
from trainer.tpu import cli as tpu

COMMAND = "shardset-trainer"
"""The installed name of this program; a shell completes commands by name, so not `python -m trainer`."""

LOOK_S = 5.0
"""How long a run folder is waited for after a Ctrl-C."""

EXIT_CODES = """exit codes:
  0  done
  1  failed; the last line on stderr says why
  2  wrong usage
  3  asked to stop (SIGTERM), everything saved: the same command goes on from there
  130  stopped by Ctrl-C: train goes on from the last checkpoint, if there is one
"""

# Flag, key of the config, help. Every other setting is changed by --set KEY=VALUE.
_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("--manifest", "manifest", "the shard set: its folder or manifest.json, local or gs://"),
    ("--run-dir", "run_dir", "where checkpoints and logs go, local or gs://"),
    ("--model", "model.name", "a timm model, or module:function called with num_classes"),
    ("--epochs", "epochs", "passes over the training split"),
    ("--global-batch-size", "global_batch_size", "samples per step over all replicas"),
    ("--strategy", "strategy", "auto, spmd, replica, ddp (start it with torchrun) or single"),
    ("--precision", "precision", "bf16 or fp32"),
    ("--resume", "resume", "auto, never, or the URL of a checkpoint or run folder"),
    ("--max-steps", "max_steps", "stop after so many steps, without changing the schedule"),
    ("--target-accuracy", "target_accuracy", "stop when the evaluation reaches this share, such as 0.76"),
    ("--seed", "seed", "of weights, order and augmentation"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = parser().parse_args(arguments)
    return run_verb(lambda: _run(options), debug=options.debug)


def _run(options: argparse.Namespace) -> int:
    try:
        options.command(options)
    except Preempted as error:
        print(error, file=sys.stderr)
        return PREEMPTED
    return OK


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = program_parser(
        COMMAND,
        "trainer",
        description="Trains on a shard set, with plain PyTorch or PyTorch/XLA.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(required=True, metavar="COMMAND")
    _verb(verbs, "train", train, "train from a manifest to a model, or go on where the run folder stands")
    _verb(verbs, "evaluate", evaluate, "print the accuracy of the best checkpoint of a run folder, or of --resume URL")
    _add_sweep(
        _verb(verbs, "bench-input", bench_input, "read and decode as training would, without a model; print the rate")
    )
    check = _verb(verbs, "doctor", doctor, "check whether this machine is ready for a run")
    check.add_argument("--want-images-per-second", type=float, metavar="N", help="what the whole run is to read")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    merge = verbs.add_parser("merge-logs", help="print the logs of all hosts by time", allow_abbrev=False)
    merge.add_argument("--run-dir", required=True, help="the run folder, local or gs://")
    merge.add_argument("--debug", action="store_true", help="show tracebacks and warnings of libraries")
    merge.set_defaults(command=merge_logs)
    _add_explain(verbs)
    tpu.register(verbs, tpu.TrainingFlags(add=_add_flags, config=config_of, words=words_of))
    report = verbs.add_parser("report", help="make one HTML page that shows a run", allow_abbrev=False)
    report.add_argument("run_dir", metavar="RUN", help="the run folder, local or gs://")
    report.add_argument("--output", metavar="FILE", help="default: report.html in the run folder")
    report.add_argument("--force", action="store_true", help="replace whatever file stands at --output")
    report.add_argument("--debug", action="store_true", help="show tracebacks and warnings of libraries")
    report.set_defaults(command=make_report)
    return top


def _verb(
    verbs: Any, name: str, command: Callable[[argparse.Namespace], None], help_text: str
) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help_text,
        description=help_text,
        epilog=_settings() + "\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_flags(verb)
    verb.add_argument("--debug", action="store_true", help="show tracebacks and warnings of libraries")
    verb.set_defaults(command=command)
    return verb


def _add_sweep(verb: argparse.ArgumentParser) -> None:
    many = verb.add_argument_group("many settings (docs/sweep.md)")
    many.add_argument("--sweep", action="extend", nargs="+", metavar="AXIS=VALUE,VALUE",
                      help="measure every combination; axes: shard (manifests), q, w, L, threads, batch")  # fmt: skip
    many.add_argument("--seconds", type=float, metavar="N", help="with --sweep: of each run (default 3)")
    many.add_argument("--rounds", type=int, metavar="N", help="with --sweep: runs of each point (default 3)")
    many.add_argument("--output", metavar="FOLDER", help="with --sweep: where sweep.json, .md and .svg go")
    many.add_argument("--json", action="store_true", help="with --sweep: print JSON instead of a table")


def _add_explain(verbs: Any) -> None:
    text = "print which samples are in a step, or in which steps a sample is, of a run that was or will be"
    verb = verbs.add_parser("explain", help=text, description=text, epilog=EXIT_CODES, allow_abbrev=False,
                            formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    verb.add_argument("--run-dir", help="the folder of a run, local or gs://; or describe one with the next five:")
    verb.add_argument("--manifest", help="the shard set: its folder or manifest.json, local or gs://")
    verb.add_argument("--recipe", help=f"one of {', '.join(configs.RECIPES)}")
    verb.add_argument("--seed", help="of the order")
    verb.add_argument("--global-batch-size", metavar="SIZE", help="samples per step over all replicas")
    verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as epochs=30")
    verb.add_argument("--step", metavar="STEP", help="of the run, counted from 0 over all epochs; or EPOCH:STEP")
    verb.add_argument("--key", help="of a sample of the training split; reads the split's indexes to find it")
    verb.add_argument("--id", type=int, help="of a sample, instead of its key; reads one index")
    verb.add_argument("--epochs", metavar="A:B", help="with --key or --id: epochs A to B - 1 (default: all)")
    verb.add_argument("--thumbnails", metavar="FILE", help="with --step: a contact sheet, .html or .png")
    verb.add_argument("--json", action="store_true", help="print everything as one JSON object")
    verb.add_argument("--debug", action="store_true", help="show tracebacks and warnings of libraries")
    verb.set_defaults(command=explain)


def _add_flags(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--recipe", help=f"where to start from: {', '.join(configs.RECIPES)}")
    for flag, key, text in _FLAGS:
        verb.add_argument(flag, dest=key, metavar=flag.rsplit("-", 1)[-1].upper(), help=text)
    verb.add_argument("--fake-data", action="store_true", help="the same path without data: the ceiling")
    verb.add_argument("--profile-steps", metavar="A:B", help="trace steps A to B into RUN_DIR/profile")
    verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change any setting, see below")


def _settings() -> str:
    values = [f"  {key} = {configs.value(configs.default(), key)}" for key in configs.keys(configs.default())]
    return "settings and their values in the recipe `default`:\n" + "\n".join(values) + "\n"


def config_of(options: argparse.Namespace, base: TrainConfig | None = None) -> TrainConfig:
    """The recipe, else the base, then the flags, then `--set`; raises ConfigError."""
    config = configs.recipe(options.recipe) if options.recipe else base or configs.default()
    values = {key: getattr(options, key) for _, key, _ in _FLAGS if getattr(options, key) is not None}
    if options.fake_data:
        values["fake_data"] = True
    if options.profile_steps is not None:
        values["profile_steps"] = options.profile_steps
    return configs.with_values(config, values | configs.pairs(options.set))


def words_of(options: argparse.Namespace) -> list[str]:
    """The flags that `config_of` understands, as a command line."""
    given = [("--recipe", options.recipe), *((flag, getattr(options, key)) for flag, key, _ in _FLAGS)]
    given += [("--profile-steps", options.profile_steps), *(("--set", setting) for setting in options.set)]
    words = [f"{flag}={value}" for flag, value in given if value is not None]
    return [*words, "--fake-data"] if options.fake_data else words


def recorded_config(run_dir: str) -> TrainConfig:
    """What the run in a folder was told to do; the plain recipe if there is none; raises ConfigError."""
    try:
        values = json.loads(open_storage(run_dir).read(configs.RECORD))
    except NotFound:
        return configs.default()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{run_dir}/{configs.RECORD}: not JSON ({error}); restore it") from error
    return replace(configs.from_dict(values), resume="auto")


def train(options: argparse.Namespace) -> None:
    """`train`."""
    config = config_of(options)
    try:
        from trainer import loop
        from trainer.runtime.launch import launch

        launch(config, loop.train)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(after_ctrl_c(config.run_dir)) from None


def after_ctrl_c(run_dir: str) -> str:
    """What the same command does after a Ctrl-C; a run folder that does not answer in `LOOK_S` is not waited for."""
    found: list[list[int]] = []

    def look() -> None:
        with suppress(ShardsetError):
            found.append(checkpoint_names.steps(open_storage(run_dir)))

    # A daemon: leaving the program does not wait for a bucket that is out of reach.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(LOOK_S)
    if found == [[]]:
        return " before the first checkpoint: nothing is saved, the same command begins again"
    goes_on = "; the same command goes on from the last checkpoint"
    return goes_on if found else f"{goes_on}, if there is one: {run_dir} does not answer"


def evaluate(options: argparse.Namespace) -> None:
    """`evaluate`: without a recipe, of the run as its folder says it was."""
    config = config_of(options, recorded_config(options.run_dir) if options.run_dir else None)
    if options.run_dir and config.manifest is None and not config.fake_data:
        raise ConfigError(
            f"{options.run_dir}: no {configs.RECORD} there, so not the folder of a run; name one that `python -m "
            "trainer train --run-dir` made"
        )
    from trainer import loop
    from trainer.runtime.launch import launch

    launch(config, loop.evaluate_checkpoint)


def bench_input(options: argparse.Namespace) -> None:
    """`bench-input`: the training stream of one host that feeds all replicas."""
    config = config_of(options)
    if options.sweep:
        from trainer.tools import sweep

        sweep.run(
            config, options.sweep, seconds=3.0 if options.seconds is None else options.seconds,
            rounds=3 if options.rounds is None else options.rounds, output=options.output, as_json=options.json,
        )  # fmt: skip
        return
    _refuse_flags_of_sweep(options)
    from trainer.data.splits import open_data

    stream = open_data(config, 0, 1).train
    limit = min(len(stream), config.max_steps or len(stream))
    start, samples = time.perf_counter(), 0
    for _, _, batch in stream.run(iter([(0, range(limit))])):
        samples += int((batch["weight"] > 0).sum())
    seconds = time.perf_counter() - start
    print(f"{samples} samples in {limit} steps and {seconds:.2f} s: {samples / seconds:.0f} samples/s on this host")


def _refuse_flags_of_sweep(options: argparse.Namespace) -> None:
    given = [name for name in ("seconds", "rounds", "output", "json") if getattr(options, name) not in (None, False)]
    if given:
        raise ConfigError(f"--{given[0]} goes with --sweep; leave it out, or name what to sweep, for example q=4,8")


def doctor(options: argparse.Namespace) -> None:
    """`doctor`: without a recipe and a manifest, for the run as its folder says it was."""
    from trainer.tools import doctor

    rate = options.want_images_per_second
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--want-images-per-second {rate} is not a rate, for example 5000")
    wanted = None if rate is None else doctor.Wanted(rate, "as given")
    again = options.run_dir and not (options.recipe or options.manifest)
    config = config_of(options, recorded_config(options.run_dir) if again else None)
    doctor.report(doctor.findings(config, wanted), as_json=options.json)


def explain(options: argparse.Namespace) -> None:
    """`explain`."""
    from trainer.tools import explain as explaining

    explaining.run(options)


def merge_logs(options: argparse.Namespace) -> None:
    """`merge-logs`."""
    from trainer.record.metrics import merged_logs

    if not is_address(options.run_dir) and not Path(options.run_dir).is_dir():
        raise ConfigError(f"{options.run_dir}: no such run folder")
    for line in merged_logs(open_storage(options.run_dir)):
        print(line)


def make_report(options: argparse.Namespace) -> None:
    """`report`."""
    from trainer.tools import report

    report.report(options)


def program() -> None:
    """What a shell runs."""
    run_program(main, "trainer")


if __name__ == "__main__":
    program()
