"""`python -m trainer explain`: the samples of a step, or the steps of a sample, from the manifest and its indexes.

Functions that find the answer come first, then those that print it. People count epochs from 1, JSON from 0.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardset.errors import ConfigError, NotFound
from shardset.format import background as backgrounds
from shardset.format import manifest as manifests
from shardset.format.background import WHITE, Background
from shardset.format.manifest import Manifest, Split
from shardset.order.budget import fit_order
from shardset.order.epoch import Order
from shardset.order.state import OrderState, quarantine_digest, state_from_json
from shardset.storage.base import Storage
from shardset.storage.open import open_file, open_storage
from shardset.stream.timetable import StepVisit, Timetable, TimetableSample, Visit
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.record.log_files import METRICS, records

MAX_ROWS = 40
"""The most rows of a table on a terminal. JSON holds everything."""

NOT_RECORDED = "the run folder has no order.json; this version computes the order from config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedStep:
    """A step and its global batch. `done` says whether the run has taken it; None without a run folder."""

    epoch: int
    step: int
    global_step: int
    done: bool | None
    num_pads: int
    samples: list[StepVisit]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleVisits:
    """A sample and the steps that use it. The run has taken the first `num_done`; None without a run folder."""

    sample: TimetableSample
    num_done: int | None
    visits: list[Visit]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The timetable of a run. The number of steps taken and the notes for the user come from its folder."""

    timetable: Timetable
    steps_done: int | None
    notes: list[str]
    background: Background = WHITE


# --- from a run folder, or from a configuration -----------------------------------------------------------------------


def plan_of_run(url: str) -> RunPlan:
    """The plan of the run in a folder. Raises ConfigError if there is no run, or if its shard set was rebuilt."""
    folder = open_storage(url)
    try:
        config = configs.recorded(folder)
    except NotFound as error:
        raise ConfigError(
            f"{folder.url}: no {configs.RECORD} there, expected the folder of a run; give the --run-dir of "
            "`python -m trainer train`, or describe the run with --manifest"
        ) from error
    state = _recorded_order(folder)
    return RunPlan(
        timetable=timetable_of(config, state),
        steps_done=steps_done(folder),
        notes=[] if state is not None else [NOT_RECORDED],
        background=backgrounds.parse(config.image.background),
    )


def plan_of_config(config: TrainConfig, num_hosts: int = 1) -> RunPlan:
    """The plan of a run with this configuration that starts on this many hosts (with ddp: processes)."""
    background = backgrounds.parse(config.image.background)
    return RunPlan(timetable=timetable_of(config, None, num_hosts), steps_done=None, notes=[], background=background)


def timetable_of(config: TrainConfig, state: OrderState | None, num_hosts: int = 1) -> Timetable:
    """The timetable of a configuration, in the recorded order `state` if there is one."""
    if config.fake_data or config.manifest is None:
        raise ConfigError("there is no shard set to explain; give --manifest, or the --run-dir of a run that has one")
    manifest, storage = manifests.load(config.manifest)
    split = manifest.split(config.train_split)
    order = _order_of(config, split, num_hosts) if state is None else _order_of_state(config, manifest, split, state)
    return Timetable(
        manifest=manifest,
        storage=storage,
        split_name=config.train_split,
        order=order,
        num_epochs=config.epochs,
    )


def steps_done(folder: Storage) -> int:
    """The number of steps in the records of the run. It may have taken more since the last record."""
    try:
        data = folder.read(METRICS)
    except NotFound:
        return 0
    return max((record["global_step"] + 1 for record in records(data) if record["kind"] == "step"), default=0)


def _recorded_order(folder: Storage) -> OrderState | None:
    try:
        return state_from_json(folder.read(configs.ORDER).strip())
    except NotFound:
        return None
    except ConfigError as error:
        raise ConfigError(
            f"{folder.url}/{configs.ORDER}: can't be read ({error.__cause__ or error}); remove it to compute "
            f"the order from {configs.RECORD}"
        ) from error


def _order_of(config: TrainConfig, split: Split, num_hosts: int) -> Order:
    return fit_order(
        split.shard_sizes,
        stored_bytes=sum(split.tar_bytes),
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        world_size=num_hosts,
        num_lanes=config.num_lanes,
        block_size=config.block_size,
        window=config.window,
        augment_repeats=config.image.augment_repeats,
        budget_bytes=config.budget_bytes,
    )


def _order_of_state(config: TrainConfig, manifest: Manifest, split: Split, state: OrderState) -> Order:
    # The order then depends on ids that the state holds only a digest of.
    if state.quarantine != quarantine_digest(()):
        raise ConfigError(
            "the run left out quarantined samples, and its folder does not list them, so their steps are unknown"
        )
    order = Order(
        shard_sizes=split.shard_sizes,
        seed=state.seed,
        global_batch_size=config.global_batch_size,
        num_lanes=state.num_lanes,
        block_size=state.block_size,
        window=state.window,
        augment_repeats=config.image.augment_repeats,
    )
    order.resume(state, manifest.digest)
    return order


# --- the two questions ------------------------------------------------------------------------------------------------


def explain_step(plan: RunPlan, text: str) -> ExplainedStep:
    """The step that `text` names: `123`, counted over all epochs, or `EPOCH:STEP` with epochs counted from 1."""
    timetable = plan.timetable
    first, colon, second = text.partition(":")
    if not first.isdecimal() or (colon and not second.isdecimal()):
        raise ConfigError(f"--step {text!r} is neither a step of the run such as 123 nor EPOCH:STEP such as 2:17")
    global_step = timetable.step_of(int(first) - 1, int(second)) if colon else int(first)
    epoch, step = timetable.place_of(global_step)
    samples = timetable.batch(global_step)
    return ExplainedStep(
        epoch=epoch,
        step=step,
        global_step=global_step,
        done=None if plan.steps_done is None else global_step < plan.steps_done,
        num_pads=sum(visit.pad for visit in samples),
        samples=samples,
    )


def explain_sample(plan: RunPlan, sample_id: int, epochs: range | None = None) -> SampleVisits:
    """The steps that use a sample, in the given epochs or in all epochs of the run."""
    timetable = plan.timetable
    if not 0 <= sample_id < timetable.split.num_samples:
        raise ConfigError(
            f"no id {sample_id} in split {timetable.split_name!r}, which has 0 to {timetable.split.num_samples - 1}"
        )
    (sample,) = timetable.samples(np.array([sample_id]))
    visits = list(timetable.visits(sample_id, range(timetable.num_epochs) if epochs is None else epochs))
    done = None if plan.steps_done is None else sum(visit.global_step < plan.steps_done for visit in visits)
    return SampleVisits(sample=sample, num_done=done, visits=visits)


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainQuery:
    """The question to `explain`: the samples of `step`, or the steps of the sample with `key` or `id`.

    `epochs`, START:STOP counted from 1, limits the steps of a sample. `thumbnails` names a file for pictures of the
    samples of a step.
    """

    step: str | None = None
    key: str | None = None
    id: int | None = None
    epochs: str | None = None
    thumbnails: str | None = None

    def __post_init__(self) -> None:
        if [self.step, self.key, self.id].count(None) != 2:
            raise ConfigError("give one of --step, --key and --id: which step's samples, or which sample's steps?")
        if self.step is None and self.thumbnails is not None:
            raise ConfigError("--thumbnails shows the samples of a step; give --step")
        if self.step is not None and self.epochs is not None:
            raise ConfigError("--epochs says where to look for a sample; with --step write EPOCH:STEP")
        if self.thumbnails is not None:
            from trainer.tools import contact_sheet

            contact_sheet.check_name(self.thumbnails)
            open_file(self.thumbnails)


def run(plan: RunPlan, query: ExplainQuery, *, as_json: bool) -> None:
    """Prints the answer as a table or as JSON, and writes the contact sheet."""
    answer = answer_to(plan, query)
    if as_json:
        print(json.dumps(to_json(plan, answer)))
    else:
        _show(plan, answer)
    if isinstance(answer, ExplainedStep) and query.thumbnails is not None:
        _write_sheet(plan, answer, query.thumbnails)


def answer_to(plan: RunPlan, query: ExplainQuery) -> ExplainedStep | SampleVisits:
    """The answer to the query."""
    if query.step is not None:
        return explain_step(plan, query.step)
    sample_id = plan.timetable.id_of(query.key) if query.key is not None else query.id
    assert sample_id is not None
    return explain_sample(plan, sample_id, None if query.epochs is None else _epochs(query.epochs))


def to_json(plan: RunPlan, answer: ExplainedStep | SampleVisits) -> dict[str, Any]:
    """The whole answer and its order as JSON values."""
    order = json.loads(plan.timetable.order.state(0, 0, plan.timetable.manifest.digest).to_json())
    split = {"manifest": plan.timetable.storage.url, "split": plan.timetable.split_name}
    values: dict[str, Any] = msgspec.to_builtins(answer)
    return split | {"order": order, "notes": plan.notes} | values


def _epochs(text: str) -> range:
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise ConfigError(f"--epochs {text!r} is not START:STOP, for example 1:91")
    return range(int(start) - 1, int(stop) - 1)


def _write_sheet(plan: RunPlan, answer: ExplainedStep, path: str) -> None:
    from trainer.tools import contact_sheet

    title = f"epoch {answer.epoch + 1} step {answer.step} (step {answer.global_step} of the run)"
    sheet = contact_sheet.render(plan.timetable, answer.samples, title=title, background=plan.background)
    storage, name = open_file(path)
    with storage.writer(name) as writer:
        writer.write(sheet)


def _show(plan: RunPlan, answer: ExplainedStep | SampleVisits) -> None:
    console = Console()
    for note in plan.notes:
        console.print(_plain(f"note: {note}"))
    if isinstance(answer, ExplainedStep):
        console.print(_plain(_step_line(plan, answer)))
        console.print(_step_table(answer.samples))
    else:
        console.print(_plain(_sample_line(answer)))
        console.print(_visits_table(answer.visits))


def _step_line(plan: RunPlan, answer: ExplainedStep) -> str:
    state = {None: "", True: ", taken", False: ", not logged as taken"}[answer.done]
    pads = f", {answer.num_pads} of them pads of weight 0" if answer.num_pads else ""
    return (
        f"step {answer.global_step} of the run is epoch {answer.epoch + 1} step {answer.step} of "
        f"{plan.timetable.order.num_batches}{state}: {len(answer.samples)} slots{pads}"
    )


def _sample_line(answer: SampleVisits) -> str:
    sample = answer.sample
    named = f", originally {sample.name}" if sample.name is not None else ""
    done = "" if answer.num_done is None else f", {answer.num_done} of them taken"
    return (
        f"{sample.key} (id {sample.id}, label {sample.label} {sample.class_name}{named}) is at position "
        f"{sample.position} of {sample.shard} and in {len(answer.visits)} steps{done}"
    )


def _step_table(samples: Sequence[StepVisit]) -> Table:
    columns = ["slot", "id", "key", "label", "original name", "shard", "position", "weight"]
    rows = [
        (
            visit.slot,
            visit.sample.id,
            visit.sample.key,
            f"{visit.sample.label} {visit.sample.class_name}",
            visit.sample.name or "",
            visit.sample.shard.rpartition("/")[2],
            visit.sample.position,
            "0 (pad)" if visit.pad else "1",
        )
        for visit in samples
    ]
    if any(visit.sample.name is not None for visit in samples):
        return _table(columns, rows)
    return _table([*columns[:4], *columns[5:]], [(*row[:4], *row[5:]) for row in rows])


def _visits_table(visits: Sequence[Visit]) -> Table:
    columns = ["epoch", "step", "step of the run", "slot", "lane", "row", "weight"]
    rows = ((v.epoch + 1, v.step, v.global_step, v.slot, v.lane, v.row, "0 (pad)" if v.pad else "1") for v in visits)
    return _table(columns, list(rows))


def _table(columns: Sequence[str], rows: Sequence[Iterable[Any]]) -> Table:
    table = Table(caption_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows[:MAX_ROWS]:
        table.add_row(*(_plain(str(cell)) for cell in row))
    if len(rows) > MAX_ROWS:
        table.caption = f"... and {len(rows) - MAX_ROWS:,} more (all of them with --json)"
    return table


def _plain(cell: str) -> Text:
    # Names come from raw input, so neither rich's markup nor control characters of the terminal may take effect.
    return Text("".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in cell))
