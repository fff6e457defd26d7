"""The values that must agree before a run starts: config and devices, all hosts, and a run with its
checkpoint.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from shardset.errors import ConfigError
from shardset.settings import values_of
from shardset.storage.base import Storage
from trainer.config import ModelConfig, TrainConfig, from_dict
from trainer.data.epochs import order_of
from trainer.data.splits import Data
from trainer.errors import CheckpointError
from trainer.plan import Plan, plan_of
from trainer.run_folder.checkpoint_state import CheckpointState
from trainer.run_folder.lock import UNRIVALLED, RunLock, acquire_run_lock, run_lock_of
from trainer.runtime.base import Runtime


def identity_of(config: TrainConfig, data: Data) -> dict[str, Any]:
    """The values that a checkpoint must share with the run that resumes from it."""
    return {
        "manifest digest": data.manifest_digest,
        "mix": [*data.mix],
        "train_split": config.train_split,
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "augment_repeats": config.image.augment_repeats,
        **model_identity_of(config.model, data.num_classes),
        "optimizer": config.optimizer.name,
    }


def model_identity_of(model: ModelConfig, num_classes: int) -> dict[str, Any]:
    """The values that a checkpoint must share with an evaluation of it."""
    return {"model": f"{model.name} stem={model.stem} norm={model.norm} classes={num_classes}"}


def facts_of(config: TrainConfig, data: Data, num_hosts: int) -> dict[str, Any]:
    """The values that all hosts of a run must share, by name; each may have its own copy of the
    shard set.
    """
    settings = {
        key: value for key, value in values_of(config).items() if key not in ("manifest", "mix")
    }
    order = order_of(data.train, 0, 0)
    return {"manifest digest": data.manifest_digest, "hosts": num_hosts, "order": order, **settings}


def check_agreement(facts: Sequence[dict[str, Any]]) -> None:
    """Raises ConfigError, naming both hosts and each difference, unless all hosts have the facts of
    host 0.
    """
    first = facts[0]
    for host, own in enumerate(facts):
        if differences := differences_of(first, own, "on host 0", f"on host {host}"):
            raise ConfigError(
                f"the hosts of this run differ: {differences}; start all with the same command"
            )


def check_identity(saved: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises CheckpointError, naming every difference, unless a checkpoint belongs to this run."""
    if text := differences_of(saved, wanted, "there", "here"):
        raise CheckpointError(
            f"{where}: belongs to another run: {text}; use the same settings, or another --run-dir"
        )


def differences_of(one: dict[str, Any], other: dict[str, Any], there: str, here: str) -> str:
    """`seed is 0 there and 7 here; ...` for the facts of the other that one has not; empty without
    any.
    """
    names = [name for name in other if one.get(name) != other[name]]
    return "; ".join(
        f"{name} is {one.get(name)!r} {there} and {other[name]!r} {here}" for name in names
    )


def doubts_about(
    config: TrainConfig,
    data: Data,
    plan: Plan,
    resumed: CheckpointState | None,
) -> Iterator[str]:
    """Warnings: odd settings of a run, and the changes since its checkpoint."""
    size = config.global_batch_size
    trained, evaluated = data.weight_of_step(0, size), data.num_eval_samples
    for split, number in {config.train_split: trained, data.eval_split: evaluated}.items():
        if number < size:
            yield (
                f"the global batch, {size}, is larger than the split {split!r}: "
                f"{1 - number / size:.0%} of each step are repeats of weight 0; "
                "give a smaller --global-batch-size"
            )
    rate_at = plan.rate_at
    if rate_at.warmup_steps > rate_at.num_steps:
        yield (
            f"the warm-up is longer than the run, {rate_at.warmup_steps} steps of"
            f" {rate_at.num_steps}: the learning rate never reaches {rate_at.peak:g}; "
            f"set schedule.warmup_epochs below {plan.epochs}"
        )
    if resumed is not None:
        before = replace(from_dict(resumed["config"]), run_dir=config.run_dir, resume=config.resume)
        if text := differences_of(values_of(before), values_of(config), "before", "now"):
            yield f"settings have changed: {text}"
        old, step = plan_of(before, plan.steps_per_epoch).rate_at, resumed["step"]
        if old != rate_at:
            last = max(0, step - 1)
            yield (
                f"the learning rate goes from {old(last):.3g} in step {last} of {old.num_steps} to"
                f" {rate_at(step):.3g} in step {step} of {rate_at.num_steps}"
            )


def acquire_run_folder(
    runtime: Runtime, folder: Storage, facts: dict[str, Any], exits: ExitStack
) -> RunLock:
    """The lock of the run folder, which the first host takes and the exits release.

    Every host must call.

    Raises ConfigError on all hosts or on none: where another run holds the folder, or the facts of
    the hosts differ (see `facts_of`).
    """
    lock, refusal = UNRIVALLED, ""
    if runtime.is_master:
        try:
            lock = acquire_run_lock(folder, lambda text: print(text, file=sys.stderr, flush=True))
            exits.callback(lock.close)
        except ConfigError as error:
            refusal = str(error)
    texts = runtime.gather_texts(json.dumps([refusal, lock.token, facts]))
    refusals, tokens, facts_of_all = zip(*map(json.loads, texts), strict=True)
    if refusals[0]:
        raise ConfigError(refusals[0])
    check_agreement(facts_of_all)
    return lock if runtime.is_master else run_lock_of(folder, tokens[0])
