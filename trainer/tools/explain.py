"""`shardset explain`: the samples of a step, the steps of a sample, or the samples of
highest loss, from the folder of a run, the manifest and its indexes.

People count epochs from 1, JSON from 0.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardset.errors import ConfigError, NotFound
from shardset.format.manifest import LoadedSet
from shardset.format.rows import numbers
from shardset.order.epoch import Order
from shardset.order.state import states_from_json, values_of_state
from shardset.program import count
from shardset.read.query import samples_of
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from shardset.terminal import on_standard_output, plain, table
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.data.mixture import Mixture
from trainer.data.splits import open_data
from trainer.telemetry.sample_losses import read_losses

_FACTS = ["id", "key", "name", "label", "class_name", "shard", "position"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """The training steps of a run, and the samples of its split; `num_epochs` are those that it
    plans.
    """

    loaded: LoadedSet
    split_name: str
    order: Order
    num_epochs: int

    @property
    def num_steps(self) -> int:
        """The steps of all epochs."""
        return self.num_epochs * self.order.num_batches

    def batch(self, global_step: int) -> pa.Table:
        """The global batch of a step, slot by slot: `samples`, and `pad`, whether each is a repeat
        of weight 0 that fills the last batch.

        Raises ConfigError if the run has no such step.
        """
        if not 0 <= global_step < self.num_steps:
            raise ConfigError(
                f"step {global_step} is not of this run: {self.num_epochs} epochs of"
                f" {self.order.num_batches} steps are the steps 0 to {self.num_steps - 1}"
            )
        slots = self.order.batch(*divmod(global_step, self.order.num_batches))
        return self.samples(slots.ids).append_column("pad", pa.array(slots.weights == 0))

    def visits(self, sample_id: int) -> Iterator[dict[str, int]]:
        """The steps of the run that train on a sample, in order, and its slot in each; pads, which
        count nowhere, are left out.
        """
        order, repeats = self.order, self.order.augment_repeats
        for epoch in range(self.num_epochs):
            rows, lanes = order.find(epoch, np.array([sample_id]))
            step, item = divmod(int(rows[0]), order.rows_per_step)
            first = (int(lanes[0]) * order.rows_per_step + item) * repeats
            if step < order.num_batches:
                global_step = epoch * order.num_batches + step
                for slot in range(first, first + repeats):
                    yield dict(epoch=epoch, step=step, global_step=global_step, slot=slot)

    def samples(self, ids: np.ndarray) -> pa.Table:
        """Samples by id, in the order of `ids`: `id`, `key`, `name` (in the raw input, None if no
        build made them), `label`, `class_name`, `shard` and `position`; reads the indexes of their
        shards.
        """
        shards = np.unique(self.order.slots_of(ids)[0]).tolist()
        tables = samples_of(self.loaded, self.split_name, ["key", "name", "label"], shards)
        wanted = pc.field("id").isin(np.unique(ids))
        samples = pa.concat_tables(rows.filter(wanted) for rows in tables)
        samples = samples.take(np.searchsorted(numbers(samples, "id"), ids))
        names = map(self.loaded.manifest.class_name, samples["label"].to_pylist())
        return samples.append_column("class_name", pa.array(names, pa.string())).select(_FACTS)

    def id_of(self, key: str) -> int:
        """The id of a key; raises ConfigError if the split has none.

        Reads all indexes of the split.
        """
        wanted = pc.field("key") == key.encode(errors="backslashreplace").decode()
        for rows in samples_of(self.loaded, self.split_name, ["key"]):
            for sample_id in rows.filter(wanted)["id"].to_pylist():
                return int(sample_id)
        raise ConfigError(
            f"no sample of split {self.split_name!r} has the key {key!r}; `shardset inspect` finds"
            " samples in all splits, by key and by name"
        )


class Question(NamedTuple):
    """What is asked about a run: one of the four."""

    step: str | None = None
    key: str | None = None
    sample_id: int | None = None
    worst: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A sentence, its numbers by name, and the rows of a table, each by column."""

    sentence: str
    numbers: dict[str, int]
    rows: list[dict[str, Any]]


def report(run_dir: str, question: Question, *, as_json: bool) -> None:
    """Prints the answer; of a mixture, one for each of its sets."""
    config, train = opened(run_dir)
    global_step, first_step = step_of(question.step or "0", len(train)), 0
    streams = {0: train} if isinstance(train, Stream) else train.streams()
    if isinstance(train, Mixture) and question.step is not None:
        part = train.part_of(global_step)
        streams, first_step = dict(part.streams()), part.steps.start
    for source, stream in streams.items():
        timetable = timetable_of(config, stream)
        if question.worst is not None:
            answer = explain_losses(timetable, open_storage(run_dir), question.worst, source)
        elif question.step is not None:
            answer = explain_step(timetable, global_step, first_step)
        elif isinstance(train, Mixture):
            raise ConfigError(
                "the steps of one sample are not known in a mixture; ask for --step or --worst"
            )
        else:
            key, sample_id = question.key, question.sample_id or 0
            answer = explain_sample(timetable, sample_id if key is None else timetable.id_of(key))
        if as_json:
            print(_json_of(timetable, answer))
            continue
        if config.mix is not None:
            print(f"set {source}, {timetable.loaded.storage.url}, by the epochs of its order:")
        _show(answer)


def opened(url: str) -> tuple[TrainConfig, Stream | Mixture]:
    """The configuration of the run in a folder, and its training stream in the recorded order.

    Raises ConfigError if a record is absent or damaged, or the shard set has changed since.
    """
    folder = open_storage(url)
    try:
        config, order = configs.recorded(folder), folder.read(configs.ORDER)
    except NotFound as error:
        raise configs.not_a_run(folder, configs.RECORD, configs.ORDER) from error
    try:
        state: Any = states_from_json(order.strip())
    except ConfigError as error:
        raise ConfigError(
            f"{folder.url}/{configs.ORDER}: can't be read ({error.__cause__}); restore it"
        ) from error
    train = open_data(replace(config, cache_dir=None, cache_bytes=None), 0, 1).train
    assert isinstance(train, Stream | Mixture), "a run on fake data records no order"
    train.load_state_dict(state)
    return config, train


def timetable_of(config: TrainConfig, stream: Stream) -> Timetable:
    """The timetable of a set of a run; a mixture's repeats its sets without end."""
    return Timetable(
        loaded=stream.source.loaded,
        split_name=config.train_split,
        order=stream.order,
        num_epochs=config.epochs if config.mix is None else sys.maxsize,
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


def explain_step(timetable: Timetable, global_step: int, first_step: int = 0) -> Explanation:
    """The samples of a step of the run; the order begins at `first_step`."""
    batch, num_batches = timetable.batch(global_step - first_step), timetable.order.num_batches
    epoch, step = divmod(global_step - first_step, num_batches)
    num_pads = batch["pad"].to_pylist().count(True)
    pads = f", {num_pads} of them pads of weight 0" if num_pads else ""
    return Explanation(
        sentence=(
            f"step {global_step} of the run is epoch {epoch + 1} step {step}"
            f" of {num_batches}: {len(batch)} slots{pads}"
        ),
        numbers={"epoch": epoch, "step": step, "global_step": global_step},
        rows=[{"slot": slot, **row} for slot, row in enumerate(batch.to_pylist())],
    )


def explain_sample(timetable: Timetable, sample_id: int) -> Explanation:
    """The steps of the run that train on a sample."""
    visits = list(timetable.visits(sample_id))
    [sample] = timetable.samples(np.array([sample_id])).to_pylist()
    named = f", originally {sample['name']}" if sample["name"] is not None else ""
    return Explanation(
        sentence=(
            f"{sample['key']} (id {sample_id}, label {sample['label']}"
            f" {sample['class_name']}{named}) is at position {sample['position']} of"
            f" {sample['shard']} and in"
            f" {count(len(visits), 'step')}"
        ),
        numbers={"id": sample_id},
        rows=visits,
    )


def explain_losses(
    timetable: Timetable, folder: Storage, number: int, source: int = 0
) -> Explanation:
    """The samples of highest mean loss over all epochs whose losses a run has recorded, worst
    first.
    """
    split = timetable.loaded.manifest.split(timetable.split_name)
    num_samples, num_epochs = split.num_samples, 0
    sums, times = np.zeros(num_samples), np.zeros(num_samples)
    for ids, losses, _ in read_losses(folder, source):
        num_epochs += 1
        sums += np.bincount(ids, losses, num_samples)
        times += np.bincount(ids, minlength=num_samples)
    if not num_epochs:
        raise ConfigError(f"{folder.url}: no losses there; train with --record-losses")
    means = np.where(times, sums / np.maximum(times, 1), -np.inf)
    worst = np.argsort(-means, kind="stable")[: min(number, np.count_nonzero(times))]
    samples = timetable.samples(worst).add_column(0, "loss", pa.array(means[worst]))
    return Explanation(
        sentence=f"the samples of highest loss, on average over {count(num_epochs, 'epoch')}",
        numbers={"num_epochs": num_epochs},
        rows=samples.to_pylist(),
    )


def _json_of(timetable: Timetable, answer: Explanation) -> str:
    state = timetable.order.state(0, 0, timetable.loaded.manifest.digest)
    about = {
        "manifest": timetable.loaded.storage.url,
        "split": timetable.split_name,
        "order": values_of_state(state),
    }
    return json.dumps(about | answer.numbers | {"rows": answer.rows})


def _show(answer: Explanation) -> None:
    columns = [
        name if isinstance(value, str | bool | None) else f"{name}#"
        for name, value in next(iter(answer.rows), {}).items()
    ]
    console = on_standard_output()
    console.print(plain(answer.sentence))
    console.print(table("", columns, [[*_cells(row)] for row in answer.rows]))


def _cells(row: dict[str, Any]) -> Iterable[str]:
    for name, value in row.items():
        if name == "epoch":
            yield str(value + 1)
        elif name == "shard":
            yield value.rpartition("/")[2]
        elif value is None or value is False:
            yield ""
        else:
            yield f"{value:.4f}" if isinstance(value, float) else str(value)
