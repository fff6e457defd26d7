"""Train and evaluate: the algorithm, and nothing else."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from shlex import quote

import msgspec

from shardset.errors import ConfigError, NotFound, StorageError
from shardset.storage.open import open_storage
from shardset.terminal import on_standard_output
from trainer.agreement import check_identity
from trainer.config import CLASSES, TrainConfig, read_json
from trainer.data.device_feed import DeviceFeed
from trainer.data.epochs import BatchSource, steps_of
from trainer.data.splits import load_once, open_data, open_evaluation
from trainer.data.step_rows import Totals
from trainer.model.learner import Learner
from trainer.plan import model_identity_of
from trainer.run import OpenData, Run
from trainer.run_folder import checkpoint
from trainer.run_folder.names import CHECKPOINTS
from trainer.runtime.base import Runtime
from trainer.telemetry.evaluation import WORST, by_class, worst_of
from trainer.telemetry.metrics import check_evaluation

FETCH_EVERY = 16
"""Evaluation steps between two fetches from the device, each of which also asks whether to stop."""


def train(runtime: Runtime, config: TrainConfig, *, open_data: OpenData = open_data) -> None:
    """Trains from the beginning or the newest checkpoint to the end, and leaves everything in the
    run folder.

    Raises Preempted when asked to stop, with everything saved; other ShardsetErrors say what went
    wrong.
    """
    with Run(runtime, config, open_data) as run:
        if run.stop_requested():
            run.stop()
        if run.epoch_is_done():
            _end_epoch(run)
        for batch in run.batches():
            run.train_step(batch)
            if run.report_is_due():
                run.report()
            if run.epoch_is_done():
                _end_epoch(run)
            elif run.save_is_due():
                run.save()
            if run.is_done():
                break
            if run.must_stop():
                run.stop()
        if not run.is_done():
            run.stop()
        run.finish()


def evaluate(
    runtime: Runtime,
    learner: Learner,
    stream: BatchSource,
    must_stop: Callable[[], bool],
    gives_up: Callable[[], bool] = lambda: False,
    *,
    num_rows: int = 0,
    with_ids: bool = False,
) -> Totals | None:
    """Sums over every sample of a split, each once, for any number of replicas; None if asked to
    stop on the way.

    `must_stop` is asked after each fetch, `gives_up` while there is no batch; `num_rows` comes from
    a DeviceFeed, as does `with_ids`, by which the Totals have the samples.
    """
    totals, rows = Totals(), []
    steps = steps_of(stream, 0, len(stream))
    feed = DeviceFeed(
        steps, runtime.to_device, stream.stop, gives_up, num_rows=num_rows, with_ids=with_ids
    )
    with feed:
        for batch in feed:
            rows.append(learner.eval_step(batch.tensors))
            if len(rows) > FETCH_EVERY:  # the device computes the newest meanwhile
                totals, rows = totals.add(runtime.fetch(rows[:-1])), rows[-1:]
                if must_stop():
                    return None
    if feed.gave_up:
        return None
    return totals.add(runtime.fetch(rows)) if rows else totals


def evaluate_checkpoint(runtime: Runtime, config: TrainConfig) -> None:
    """Prints the accuracy of a checkpoint (`config.resume`, or the best of the run folder) on the
    evaluation split.

    By class too; the run folder keeps the worst samples. Evaluates its averaged weights if it has
    them, as its run did, unless the config turns them off by 0.
    """
    num_rows = runtime.num_rows(config.global_batch_size, 1)
    data = open_evaluation(config, runtime.host, runtime.num_hosts)
    is_of_run = config.resume in ("auto", "never")
    commit, state = (
        checkpoint.chosen(open_storage(config.run_dir))
        if is_of_run
        else checkpoint.at(open_storage(config.resume), print)
    )
    check_classes(config, data.class_names)
    check_identity(
        commit.identity, model_identity_of(config.model, data.num_classes), f"step {commit.step}"
    )
    if state["ema"] is not None and config.regularize.ema_decay is None:
        decay = state["config"]["regularize"]["ema_decay"]
        config = replace(config, regularize=replace(config.regularize, ema_decay=decay))
    learner = Learner(runtime, config, data.num_classes, state)
    start = time.perf_counter()
    totals = (
        evaluate(runtime, learner, data.evaluation, lambda: False, num_rows=num_rows, with_ids=True)
        or Totals()
    )
    check_evaluation(totals, data.num_eval_samples)
    checkpoint.drop_shared()
    if runtime.is_master:
        top5 = f" (top-5 {totals.mean('top5'):.4f})" if data.num_classes > 5 else ""
        print(
            f"step {commit.step}: {data.eval_split} accuracy {totals.mean('top1'):.4f}{top5},"
            f" loss {totals.mean('loss'):.4f}, "
            f"{int(totals.weight)} samples in {time.perf_counter() - start:.1f} s"
        )
        on_standard_output().print(by_class(totals.samples, data.class_names))
        if config.manifest is not None and is_of_run:
            worst = worst_of(
                totals.samples, load_once(config.manifest), data.eval_split, data.class_names
            )
            try:
                open_storage(config.run_dir).write(WORST, msgspec.json.encode(worst))
            except StorageError as error:
                print(f"note: the samples of highest loss are not kept ({error})")
            print(f"next: shardset report {quote(config.run_dir)}")


def check_classes(config: TrainConfig, names: Sequence[str]) -> None:
    """Raises ConfigError if the classes of the evaluated set have `names` other than those that the
    run of the checkpoint recorded, or another order. Classes that have only a number can be any.
    """
    is_of_run = config.resume in ("auto", "never")
    # a checkpoint may be named, too
    run_dir = config.run_dir if is_of_run else config.resume.partition(f"/{CHECKPOINTS}")[0]
    with suppress(NotFound):
        recorded = read_json(open_storage(run_dir), CLASSES)
        pairs = zip_longest(names, recorded, fillvalue="no class")
        for label, (name, expected) in enumerate(pairs):
            if name != expected and str(label) not in (name, expected):
                raise ConfigError(
                    f"{config.manifest}: has {len(names)} classes, the run knows {len(recorded)}:"
                    f" label {label} is {name} here and {expected} there; build the set with the"
                    " classes of the run in their order"
                )


def _end_epoch(run: Run) -> None:
    run.check_epoch()
    totals = evaluate(
        run.runtime,
        run.learner,
        run.data.evaluation,
        run.stop_requested_while_evaluating,
        run.stop_requested_while_waiting,
        num_rows=run.plan.num_rows,
    )
    run.close_epoch(totals)
