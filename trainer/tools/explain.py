"""`python -m trainer explain`: the samples of a step, or the steps of a sample, from the manifest
and its indexes.

People count epochs from 1, JSON from 0.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardset.errors import ConfigError, NotFound, printable
from shardset.format import manifest as manifests
from shardset.order.budget import OrderOptions, fit_order
from shardset.order.state import OrderState, States, states_from_json
from shardset.program import count
from shardset.storage.base import Storage
from shardset.storage.checked import read_small
from shardset.storage.open import open_storage
from shardset.stream.timetable import StepVisit, Timetable, TimetableSample, Visit
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.data.mixture import Mixture
from trainer.data.splits import open_data
from trainer.record.loss_files import read_losses

MAX_ROWS = 40
"""The most rows of a table on a terminal. JSON holds everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedStep:
    """A step and its global batch."""

    epoch: int
    step: int
    global_step: int
    samples: list[StepVisit]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedSample:
    """A sample and the steps of the run that train on it."""

    sample: TimetableSample
    visits: list[Visit]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLoss:
    """A sample and its mean loss."""

    loss: float
    sample: TimetableSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedLosses:
    """The samples of highest loss, over so many epochs."""

    num_epochs: int
    samples: list[SampleLoss]


Answer = ExplainedStep | ExplainedSample | ExplainedLosses


def run(
    config: TrainConfig,
    state: States | None,
    *,
    num_hosts: int,
    step: str | None,
    key: str | None,
    sample_id: int | None,
    worst: int | None,
    as_json: bool,
) -> None:
    """Prints the answer for one of `step`, `key`, `sample_id` and `worst`; of a mixture, one for
    each of its sets.
    """
    answer: Answer
    global_step, first_step, timetables = timetables_of(config, state, num_hosts, step)
    for source, timetable in timetables.items():
        if worst is not None:
            if state is None:
                raise ConfigError("losses are in the folder of a run; give --run-dir")
            answer = explain_losses(timetable, open_storage(config.run_dir), worst, source)
        elif step is not None:
            answer = explain_step(timetable, global_step, first_step)
        elif config.mix is not None:
            raise ConfigError(
                "the steps of one sample are not known in a mixture; ask for --step or --worst"
            )
        else:
            sample_id = sample_id if key is None else timetable.id_of(key)
            assert sample_id is not None
            answer = explain_sample(timetable, sample_id)
        if as_json:
            order = json.loads(
                timetable.order.state(0, 0, timetable.loaded.manifest.digest).to_json()
            )
            values = {
                "manifest": timetable.loaded.storage.url,
                "split": timetable.split_name,
                "order": order,
            }
            print(json.dumps(values | msgspec.to_builtins(answer)))
            continue
        if config.mix is not None:
            print(f"set {source}, {timetable.loaded.storage.url}, by the epochs of its own order:")
        show(timetable, answer)


def timetables_of(
    config: TrainConfig, state: States | None, num_hosts: int, step: str | None
) -> tuple[int, int, dict[int, Timetable]]:
    """The step of the run that is meant, that at which the orders of its sets begin, and their
    timetables by number.

    Without a step, the timetables of all sets. Raises ConfigError as `timetable_of`.
    """
    if config.mix is None:
        timetable = timetable_of(config, state, num_hosts)
        return step_of(step or "0", timetable.order.num_batches), 0, {0: timetable}
    if not isinstance(state, list):
        raise ConfigError("the order of a mixture is in the folder of its run; give --run-dir")
    mixture = open_data(replace(config, cache_dir=None, cache_bytes=None), 0, 1).train
    assert isinstance(mixture, Mixture)
    mixture.load_state_dict(state)
    global_step = step_of(step or "0", len(mixture))
    part = mixture.part_of(global_step)
    timetables = {
        source: Timetable(
            loaded=stream.source.loaded,
            split_name=config.train_split,
            order=stream.order,
            num_epochs=sys.maxsize,
        )
        for source, stream in (mixture.streams().items() if step is None else part.streams())
    }
    return global_step, part.steps.start, timetables


def recorded_run(url: str) -> tuple[TrainConfig, States]:
    """The configuration and the order of the run in a folder; raises ConfigError if either is
    absent or damaged.
    """
    folder = open_storage(url)
    try:
        config, order = configs.recorded(folder), read_small(folder, configs.ORDER)
    except NotFound as error:
        raise ConfigError(
            f"{folder.url}: no {configs.RECORD} and {configs.ORDER} there, expected the folder of a"
            " run; give the --run-dir of `python -m trainer train`, or describe the run with"
            " --manifest"
        ) from error
    try:
        return replace(config, run_dir=url), states_from_json(order.strip())
    except ConfigError as error:
        raise ConfigError(
            f"{folder.url}/{configs.ORDER}: can't be read ({error.__cause__ or error}); describe"
            " the run with --manifest"
        ) from error


def timetable_of(config: TrainConfig, state: States | None = None, num_hosts: int = 1) -> Timetable:
    """The timetable of a run: in its recorded order, else in the one with which it would start on
    this many hosts.

    Raises ConfigError without a shard set, and if the recorded order is that of another one.
    """
    if config.fake_data or config.manifest is None:
        raise ConfigError(
            "there is no shard set to explain; give --manifest, or the --run-dir of a run that"
            " has one"
        )
    loaded = manifests.load(config.manifest)
    split, ids = (
        loaded.manifest.split(config.train_split),
        loaded.part(config.train_split).selection,
    )
    recorded = state if isinstance(state, OrderState) else None
    chosen = recorded or config
    options = OrderOptions(
        seed=chosen.seed,
        global_batch_size=config.global_batch_size,
        world_size=num_hosts,
        num_lanes=chosen.num_lanes,
        block_size=chosen.block_size,
        window=chosen.window,
        augment_repeats=config.image.augment_repeats,
        budget_bytes=config.budget_bytes,
    )
    order = fit_order(split.shard_sizes, options, stored_bytes=split.num_tar_bytes, view=ids)
    if recorded:
        order.resume(recorded, loaded.manifest.digest)
    return Timetable(
        loaded=loaded, split_name=config.train_split, order=order, num_epochs=config.epochs
    )


def step_of(text: str, per_epoch: int) -> int:
    """The step of the run that a text names: `123`, counted over all epochs, or `EPOCH:STEP`,
    epochs from 1.
    """
    first, colon, second = text.partition(":")
    if not first.isdecimal() or (colon and not second.isdecimal()):
        raise ConfigError(
            f"--step {text!r} is neither a step of the run such as 123 nor EPOCH:STEP such as 2:17"
        )
    epoch, step = (int(first) - 1, int(second)) if colon else divmod(int(first), per_epoch)
    if step >= per_epoch:
        raise ConfigError(f"an epoch has the steps 0 to {per_epoch - 1}, not {step}")
    return epoch * per_epoch + step


def explain_step(timetable: Timetable, global_step: int, first_step: int = 0) -> ExplainedStep:
    """The samples of a step of the run; the order begins at `first_step`."""
    own_step = global_step - first_step
    epoch, step = divmod(own_step, timetable.order.num_batches)
    return ExplainedStep(
        epoch=epoch, step=step, global_step=global_step, samples=timetable.batch(own_step)
    )


def explain_sample(timetable: Timetable, sample_id: int) -> ExplainedSample:
    """The steps of the run that train on a sample."""
    visits = list(timetable.visits(sample_id, range(timetable.num_epochs)))
    (sample,) = timetable.samples(np.array([sample_id]))
    return ExplainedSample(sample=sample, visits=visits)


def explain_losses(
    timetable: Timetable, folder: Storage, number: int, source: int = 0
) -> ExplainedLosses:
    """The samples of highest mean loss over all epochs whose losses a run has recorded, worst
    first.
    """
    sums, times = np.zeros(timetable.split.num_samples), np.zeros(timetable.split.num_samples)
    num_epochs = 0
    for ids, losses, _ in read_losses(folder, source):
        num_epochs += 1
        np.add.at(sums, ids, losses)
        np.add.at(times, ids, 1)
    if not num_epochs:
        raise ConfigError(f"{folder.url}: no losses there; train with --record-losses")
    means = np.where(times, sums / np.maximum(times, 1), -np.inf)
    worst = np.argsort(-means, kind="stable")[: min(number, np.count_nonzero(times))]
    found = zip(means[worst].tolist(), timetable.samples(worst), strict=True)
    samples = [SampleLoss(loss=loss, sample=sample) for loss, sample in found]
    return ExplainedLosses(num_epochs=num_epochs, samples=samples)


def show(timetable: Timetable, answer: Answer) -> None:
    """Prints the answer as a line and a table."""
    console = Console()
    if isinstance(answer, ExplainedLosses):
        line = f"the samples of highest loss, on average over {count(answer.num_epochs, 'epoch')}"
        losses = [
            (
                f"{one.loss:.4f}",
                sample.id,
                sample.key,
                f"{sample.label} {sample.class_name}",
                sample.name or "",
            )
            for one in answer.samples
            for sample in [one.sample]
        ]
        table = _table(["loss", "id", "key", "label", "original name"], losses)
    elif isinstance(answer, ExplainedStep):
        num_pads = sum(visit.pad for visit in answer.samples)
        pads = f", {num_pads} of them pads of weight 0" if num_pads else ""
        line = (
            f"step {answer.global_step} of the run is epoch {answer.epoch + 1} step {answer.step}"
            f" of {timetable.order.num_batches}: {len(answer.samples)} slots{pads}"
        )
        rows = [
            (
                visit.slot,
                sample.id,
                sample.key,
                f"{sample.label} {sample.class_name}",
                sample.name or "",
                sample.shard.rpartition("/")[2],
                sample.position,
                "(pad)" if visit.pad else "",
            )
            for visit in answer.samples
            for sample in [visit.sample]
        ]
        table = _table(
            ["slot", "id", "key", "label", "original name", "shard", "position", ""], rows
        )
    else:
        sample = answer.sample
        named = f", originally {sample.name}" if sample.name is not None else ""
        line = (
            f"{sample.key} (id {sample.id}, label {sample.label} {sample.class_name}{named}) is at"
            f" position {sample.position} of {sample.shard} and in {len(answer.visits)} steps"
        )
        steps = [
            (visit.epoch + 1, visit.step, visit.global_step, visit.slot) for visit in answer.visits
        ]
        table = _table(["epoch", "step", "step of the run", "slot"], steps)
    console.print(Text(printable(line)))
    console.print(table)


def _table(columns: Sequence[str], rows: Sequence[Iterable[Any]]) -> Table:
    table = Table(caption_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows[:MAX_ROWS]:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    if len(rows) > MAX_ROWS:
        table.caption = f"... and {len(rows) - MAX_ROWS:,} more (all of them with --json)"
    return table
