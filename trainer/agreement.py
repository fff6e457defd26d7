"""The values that must agree before a run starts: config and devices, all hosts, and a run with its
checkpoint.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from shardset.errors import ConfigError
from shardset.settings import values_of
from shardset.storage.base import Storage
from trainer.config import TrainConfig, from_dict
from trainer.data.splits import Data
from trainer.errors import CheckpointError
from trainer.plan import Plan, schedule_of
from trainer.run_folder.checkpoint_state import CheckpointState
from trainer.run_folder.lock import UNRIVALLED, RunLock, SeenLease, acquire_run_lock
from trainer.runtime.base import Runtime


def check_agreement(runtime: Runtime, facts: dict[str, Any], first: dict[str, Any]) -> None:
    """Raises ConfigError on all hosts unless each has the facts of the first one. The others name
    each difference. Every host must call.
    """
    text = differences_of(first, facts, "on host 0", f"on host {runtime.host}")
    if runtime.any_host(bool(text)):
        raise ConfigError(
            f"the hosts of this run differ: {text or 'another host says how'}; start all with the"
            " same command"
        )


def check_identity(saved: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises CheckpointError, naming every difference, unless a checkpoint belongs to this run."""
    if text := differences_of(saved, wanted, "there", "here"):
        raise CheckpointError(
            f"{where}: belongs to another run: {text}; use the same settings, or another --run-dir"
        )


def differences_of(saved: dict[str, Any], facts: dict[str, Any], there: str, here: str) -> str:
    """`seed is 0 there and 7 here; ...` for the facts that the saved ones lack, maybe none."""
    names = [name for name in facts if saved.get(name) != facts[name]]
    return "; ".join(
        f"{name} is {saved.get(name)!r} {there} and {facts[name]!r} {here}" for name in names
    )


def doubts_about(
    config: TrainConfig, data: Data, plan: Plan, resumed: CheckpointState | None
) -> Iterator[str]:
    """Warnings: odd settings of a run, and the changes since its checkpoint."""
    rate_at = plan.rate_at
    if resumed is not None:
        before = replace(from_dict(resumed["config"]), run_dir=config.run_dir, resume=config.resume)
        if text := differences_of(values_of(before), values_of(config), "before", "now"):
            yield f"settings have changed: {text}"
        old, step = schedule_of(before, plan.steps_per_epoch), resumed["step"]
        if old != rate_at:
            last = max(0, step - 1)
            yield (
                f"the learning rate goes from {old(last):.3g} in step {last} of {old.num_steps} to"
                f" {rate_at(step):.3g} in step {step} of {rate_at.num_steps}"
            )
    if rate_at.warmup_steps > rate_at.num_steps:
        yield (
            f"the warm-up is longer than the run, {rate_at.warmup_steps} steps of"
            f" {rate_at.num_steps}: the learning rate never reaches {rate_at.peak:g}; "
            f"set schedule.warmup_epochs below {config.epochs}"
        )
    size = config.global_batch_size
    trained, evaluated = data.weight_of_step(0, size), data.num_eval_samples
    for split, number in {config.train_split: trained, data.eval_split: evaluated}.items():
        if number < size:
            yield (
                f"the global batch, {size}, is larger than the split {split!r}: "
                f"{1 - number / size:.0%} of each step are repeats of weight 0; "
                "give a smaller --global-batch-size"
            )


def acquire_run_folder(
    runtime: Runtime, folder: Storage, facts: dict[str, Any], exits: ExitStack
) -> RunLock:
    """The lock of the run folder, which the first host takes and the exits release.

    Every host must call.

    Raises ConfigError on all hosts or on none: where another run holds the folder, or the facts of
    the hosts differ (see `Plan.facts`).
    """
    lock, refusal = UNRIVALLED, ""
    if runtime.is_master:
        try:
            lock = acquire_run_lock(folder, lambda text: print(text, file=sys.stderr, flush=True))
            exits.callback(lock.close)
        except ConfigError as error:
            refusal = str(error)
    text = json.dumps([refusal, lock.token, facts])
    refusal, token, first = json.loads(runtime.text_of_master(text))
    if refusal:
        raise ConfigError(refusal)
    check_agreement(runtime, json.loads(text)[-1], first)
    if runtime.is_master or not folder.is_remote:
        return lock
    return SeenLease(folder, token)
