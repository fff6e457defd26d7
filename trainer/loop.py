"""Train and evaluate: the algorithm, and nothing else."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardset.storage.open import open_storage
from trainer.config import TrainConfig
from trainer.data.device_feed import DeviceFeed
from trainer.data.splits import Batches, open_data, steps_of
from trainer.model.learner import Learner
from trainer.record import checkpoint
from trainer.record.metrics import Totals
from trainer.run import Run, check_batch, check_evaluation, model_of
from trainer.runtime.runtime import Runtime

EVAL_ROWS = 16
"""Evaluation steps between two looks at the device, and at whether to stop."""


def train(runtime: Runtime, config: TrainConfig) -> None:
    """Trains from the beginning or the newest checkpoint to the end, and leaves everything in the run folder.

    Raises Preempted when asked to stop, with everything saved; other ShardsetErrors say what went wrong.
    """
    with Run(runtime, config) as run:
        if run.was_asked():
            run.stop()
        if run.epoch_is_done():
            _end_epoch(run)
        for fed in run.batches():
            run.learn(fed)
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
    stream: Batches,
    must_stop: Callable[[], bool],
    gives_up: Callable[[], bool] = lambda: False,
) -> Totals | None:
    """Sums over every sample of a split, each once, for any number of replicas; None if asked to stop on the way.

    `gives_up` is asked while there is no batch.
    """
    totals, rows = Totals(), []
    with DeviceFeed(steps_of(stream, 0, len(stream)), runtime.put, stream.stop, gives_up) as feed:
        for fed in feed:
            rows.append(learner.eval_step(fed.tensors))
            if len(rows) == EVAL_ROWS:
                totals, rows = totals.plus(runtime.fetch(rows)), []
                if must_stop():
                    return None
    if feed.gave_up:
        return None
    return totals.plus(runtime.fetch(rows)) if rows else totals


def evaluate_checkpoint(runtime: Runtime, config: TrainConfig) -> None:
    """Prints the accuracy of a checkpoint (`config.resume`, or the best of the run folder) on the evaluation split.

    Its averaged weights are evaluated if it has them, as in its run, unless the config turns them off by 0.
    """
    check_batch(config, runtime)
    data = open_data(config, runtime.host, runtime.num_hosts)
    commit, state = _chosen(config)
    checkpoint.check_identity(commit.identity, model_of(config, data), f"step {commit.step}")
    learner = Learner(runtime, _with_averages(config, state), data.num_classes, state)
    start = time.perf_counter()
    totals = evaluate(runtime, learner, data.evaluation, lambda: False) or Totals()
    check_evaluation(totals, data.num_eval_samples)
    if runtime.is_master:
        print(
            f"step {commit.step}: accuracy {totals.mean('top1'):.4f} (top-5 {totals.mean('top5'):.4f}), "
            f"loss {totals.mean('loss'):.4f}, {int(totals.weight)} samples in {time.perf_counter() - start:.1f} s"
        )


def _end_epoch(run: Run) -> None:
    run.check_epoch()
    evaluation = run.data.evaluation
    run.close_epoch(evaluate(run.runtime, run.learner, evaluation, run.was_asked_meanwhile, run.was_asked_alone))


def _chosen(config: TrainConfig) -> tuple[checkpoint.CommitMark, dict[str, Any]]:
    if config.resume not in ("auto", "never"):
        return checkpoint.at(open_storage(config.resume), print)
    storage = open_storage(config.run_dir)
    commit = checkpoint.best(checkpoint.commits(storage, print))
    return (commit, checkpoint.read(storage, commit)) if commit else checkpoint.at(storage, print)


def _with_averages(config: TrainConfig, state: dict[str, Any]) -> TrainConfig:
    if state["ema"] is None or config.regularize.ema_decay is not None:
        return config
    decay = state["config"]["regularize"]["ema_decay"]
    return replace(config, regularize=replace(config.regularize, ema_decay=decay))
