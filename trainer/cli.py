"""`python -m trainer VERB`: arguments -> records -> one call."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from shlex import quote
from typing import Any, NoReturn

from shardset.errors import DOCS, ConfigError, DamagedShard, ManifestError, NotFound, StorageError
from shardset.program import (
    OK,
    PREEMPTED,
    Parser,
    count,
    program_parser,
    run_program,
    run_verb,
)
from shardset.settings import help_text
from shardset.storage.open import open_storage
from shardset.verbs import add_verb
from trainer import defaults, recipes
from trainer.config import RECORD, TrainConfig, check_addresses, not_a_run, recorded
from trainer.errors import Preempted
from trainer.flags import EVALUATION, add_config_flags, config_flags, near_miss
from trainer.tpu import cli as tpu

RUN_DIR_HELP = "run folder: local, gs://, s3:// or az://"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code."""
    top = parser()
    options, unknown = top.parse_known_args(arguments)
    if unknown:
        top.error(
            "unrecognized arguments:"
            f" {' '.join(unknown)}{near_miss(unknown[0], options.verb_parser)}"
        )
    return run_verb(
        lambda: _run(options),
        debug=options.debug,
        is_interactive=options.command in (_explain, _doctor),
    )


def _run(options: argparse.Namespace) -> int:
    if options.command in WITH_TORCH and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print("loading torch", file=sys.stderr)
    try:
        options.command(options)
    except Preempted as error:
        print(error, file=sys.stderr)
        return PREEMPTED
    return OK


# --- the command line -----------------------------------------------------------------------------


def parser() -> Parser:
    """The command line."""
    top = program_parser(
        "trainer",
        description="Trains on a shard set, with plain PyTorch or PyTorch/XLA.",
    )
    verbs = top.add_subparsers(required=True, metavar="COMMAND")
    verb = add_verb(verbs, "train", command=_train)
    verb.usage = "%(prog)s --manifest SET [--run-dir DIR] [FLAG ...]"
    add_config_flags(verb)
    settings = (
        "settings for --set, as in the recipe `default`; those with `auto` follow from the data if"
        f" no recipe is given:\n{help_text(recipes.default())}"
    )
    text = "list all settings for --set and exit"
    verb.add_argument("--help-settings", action="version", version=settings, help=text)
    verb = add_verb(verbs, "evaluate", command=_evaluate)
    add_config_flags(verb, EVALUATION, "are those in the run folder")
    add_config_flags(add_verb(verbs, "bench-input", command=_bench_input))
    verb = add_verb(verbs, "doctor", command=_doctor)
    add_config_flags(verb)
    verb.add_argument(
        "--want-images-per-second", type=float, metavar="N", help="rate that the run should read at"
    )
    verb.add_argument("--json", action="store_true", help="print the findings as JSON")
    verb = add_verb(verbs, "merge-logs", command=_merge_logs)
    verb.add_argument("--run-dir", required=True, help=RUN_DIR_HELP)
    _add_explain(verbs)
    _add_job(verbs)
    tpu.register(verbs)
    verb = add_verb(verbs, "report", command=_make_report)
    verb.add_argument("run_dir", metavar="RUN", help=RUN_DIR_HELP)
    verb.add_argument("--output", metavar="FILE", help="default: report.html in the run folder")
    example = "example: shardset export run --output model --onnx"
    verb = add_verb(verbs, "export", examples=example, command=_export_model)
    verb.add_argument("run_dir", metavar="RUN", help=RUN_DIR_HELP)
    verb.add_argument(
        "--output", required=True, metavar="FOLDER", help="folder for the files, local or gs://"
    )
    verb.add_argument("--onnx", action="store_true", help="write a graph for ONNX, too")
    example = "example: shardset predict --from run cat.jpg dog.png"
    verb = add_verb(verbs, "predict", examples=example, command=_predict)
    verb.add_argument(
        "images", nargs="+", metavar="IMAGE", help="images, local or remote; or a local folder"
    )
    text = "run folder (its best checkpoint), or a folder that `export` wrote; local or remote"
    verb.add_argument("--from", dest="model", required=True, metavar="FOLDER", help=text)
    verb.add_argument(
        "--top", type=int, default=5, metavar="N", help="classes for each image (default: 5)"
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object for each image")
    return top


def _add_explain(verbs: Any) -> None:
    verb = add_verb(verbs, "explain", command=_explain)
    verb.add_argument("--run-dir", required=True, help=RUN_DIR_HELP)
    asked = verb.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--step",
        help="step of the run, counted from 0 over all epochs; or EPOCH:STEP, epochs from 1",
    )
    asked.add_argument(
        "--key", help="key of a sample of the training split; reads the split's indexes to find it"
    )
    asked.add_argument("--id", type=int, help="id of a sample, instead of its key; reads one index")
    text = "print the N samples of highest loss in a run with --record-losses"
    asked.add_argument("--worst", type=int, metavar="N", help=text)
    verb.add_argument("--json", action="store_true", help="print everything as one JSON object")


def _add_job(verbs: Any) -> None:
    example = (
        "example: shardset job --compute-type v6e-16 --image IMAGE --manifest gs://B/set"
        " --run-dir gs://B/r"
    )
    verb = add_verb(verbs, "job", examples=example, command=_job)
    text = (
        "accelerators and the number of all their chips or GPUs, for example v6e-16, v5e-64 or"
        " h100-80gb-16"
    )
    verb.add_argument("--compute-type", required=True, metavar="NAME-COUNT", help=text)
    verb.add_argument(
        "--image",
        required=True,
        help=f"container image of the trainer, see {DOCS}/how-to/clusters.md",
    )
    verb.add_argument("--name", default="train", help="name of the JobSet (default: train)")
    verb.add_argument(
        "--queue",
        default="multislice-queue",
        help="Kueue's LocalQueue (default: Cluster Toolkit's)",
    )
    add_config_flags(verb)


# --- the verbs ------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> None:
    config, about = defaults.resolve(config_flags(options))
    if os.environ.get("RANK", "0") == "0":
        for text in filter(None, (about, defaults.note(config))):
            print(text, flush=True)
    _check_data(config)
    from trainer import loop
    from trainer.runtime.launch import launch

    launch(config, loop.train)


def _evaluate(options: argparse.Namespace) -> None:
    """`evaluate`: without a recipe, with the configuration in the run folder."""
    config = config_flags(options).config(
        recorded_config(options.run_dir) if options.run_dir else None
    )
    if options.run_dir and config.manifest is None and not config.fake_data:
        raise not_a_run(open_storage(options.run_dir), RECORD)
    _check_data(config)
    from trainer import loop
    from trainer.runtime.launch import launch

    launch(config, loop.evaluate_checkpoint)


def _check_data(config: TrainConfig) -> None:
    """Raises ConfigError, before torch is imported, if there is no set to read."""
    if not config.fake_data:
        from trainer.data.splits import set_of

        set_of(config)


def recorded_config(run_dir: str) -> TrainConfig:
    """The configuration in a run folder, to be resumed; the default recipe if there is none.

    Raises ConfigError.
    """
    try:
        return replace(recorded(open_storage(run_dir)), resume="auto")
    except NotFound:
        return recipes.default()


def _bench_input(options: argparse.Namespace) -> None:
    """`bench-input`: the training stream of one host that feeds all replicas."""
    config, _ = defaults.resolve(config_flags(options))
    from trainer.data.splits import open_data

    stream = open_data(config, 0, 1).train
    limit = min(len(stream), config.max_steps or len(stream))
    start, num_samples = time.perf_counter(), 0
    for _, _, batch in stream.run(iter([(0, range(limit))])):
        num_samples += int((batch["weight"] > 0).sum())
    seconds = time.perf_counter() - start
    print(
        f"{num_samples} samples in {limit} steps and {seconds:.2f} s:"
        f" {num_samples / seconds:.0f} samples/s on this host"
    )


def _doctor(options: argparse.Namespace) -> None:
    """`doctor`: without a recipe and a manifest, for the configuration in the run folder."""
    from trainer.tools import doctor

    flags = config_flags(options)
    try:
        of_run = options.run_dir and not (options.recipe or options.manifest)
        config = (
            flags.config(recorded_config(options.run_dir)) if of_run else defaults.resolve(flags)[0]
        )
    # of the shard set, where a check says what is wrong
    except (ManifestError, StorageError, DamagedShard):
        config = flags.config()
    doctor.report(doctor.run_checks(config, options.want_images_per_second), as_json=options.json)


def _explain(options: argparse.Namespace) -> None:
    from trainer.tools import explain

    question = explain.Question(options.step, options.key, options.id, options.worst)
    explain.report(options.run_dir, question, as_json=options.json)


def _job(options: argparse.Namespace) -> None:
    from trainer.tools import job

    flags, compute = config_flags(options), job.compute_of(options.compute_type)
    check_addresses(flags.config())
    place = {"name": options.name, "queue": options.queue, "image": options.image}
    print(job.Job(**place, compute=compute, arguments=flags.arguments()).render(), end="")


def _merge_logs(options: argparse.Namespace) -> None:
    from trainer.run_folder.names import merged_logs

    for line in merged_logs(open_storage(options.run_dir)):
        print(line)


def _make_report(options: argparse.Namespace) -> None:
    from rich.filesize import decimal

    from trainer.tools import report

    run, url, num_bytes = report.write(options.run_dir, options.output)
    print(f"report: {url} ({decimal(num_bytes)}, {count(run.last_step, 'step')})")


def _export_model(options: argparse.Namespace) -> None:
    from trainer.tools import export, trained

    files = export.write(trained.opened(options.run_dir), options.output, onnx=options.onnx)
    print(f"wrote {', '.join(files)} to {options.output}")
    print(f"next: shardset predict --from {quote(options.output)} IMAGE")


def _predict(options: argparse.Namespace) -> None:
    if options.top < 1:
        raise ConfigError(f"--top {options.top}: expected 1 or more classes for each image")
    from trainer.tools import predict, trained

    predict.report(
        trained.opened(options.model), options.images, top=options.top, as_json=options.json
    )


WITH_TORCH = (_train, _evaluate, _predict, _export_model, _bench_input, _doctor)
"""The verbs that load torch, which takes seconds."""


def program() -> NoReturn:
    """The program of a shell."""
    run_program(main, "trainer")
