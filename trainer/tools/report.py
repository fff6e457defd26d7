"""`report.html` of a run: curves, epochs, evaluations and configuration on one page.

See `docs/how-to/check.md`.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardset.errors import ConfigError, NotFound
from shardset.html import page, plots
from shardset.html.plots import Plot
from shardset.prepared import JSON_ERRORS
from shardset.settings import value_text, values_of
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from trainer import config as configs
from trainer.config import TrainConfig, mixed_sets
from trainer.run_folder.names import METRICS
from trainer.telemetry.evaluation import WORST, Worst
from trainer.telemetry.metrics import (
    EpochRecord,
    EvalRecord,
    FinalRecord,
    Record,
    StepRecord,
    advice,
)

MAX_ROWS = 200
SMOOTHING = 0.9
"""The weight of the points before in the curves of training: an exponential moving mean."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The contents of a run folder.

    If a resumed run took a step again, only the newest record of the step counts.

    `started` is the day of the first record. `final` is None if the run is running or was stopped.
    `num_damaged` counts the damaged lines of metrics.jsonl.
    """

    url: str
    started: str

    steps: list[StepRecord]
    epochs: list[EpochRecord]
    evaluations: list[EvalRecord]
    final: FinalRecord | None
    last_step: int
    num_damaged: int
    config: TrainConfig
    worst: Worst


def write(url: str, output: str | None = None) -> tuple[RunRecord, str, int]:
    """Writes the page of the run folder at `url`.

    Returns the run, the address of the page, and its size.

    Raises ConfigError if metrics.jsonl holds no record or another file is damaged, or if the
    page would replace a file that is not such a page.
    """
    storage = open_storage(url)
    run = read(storage)
    target, name = page.output_of(storage, output)
    data = render(run)
    target.write(name, data)
    return run, f"{target.url}/{name}", len(data)


# --- reading --------------------------------------------------------------------------------------


def read(storage: Storage) -> RunRecord:
    """Reads everything on the page from a run folder."""
    try:
        data, config = storage.read(METRICS), configs.recorded(storage)
    except NotFound as error:
        raise configs.not_a_run(storage, METRICS, configs.RECORD) from error
    lines = data.splitlines()
    written = [record for line in lines if (record := _record_of(line)) is not None]
    if not written:
        raise ConfigError(
            f"{storage.url}/{METRICS}: no record in it yet; wait for the first reported step"
        )
    newest = {(type(record), record.global_step): record for record in written}.values()
    records = sorted(newest, key=lambda record: record.global_step)
    last_step = records[-1].global_step
    ends = [each for each in records if isinstance(each, FinalRecord)]
    day = re.search(rb'"time": "([\d-]+)', data)
    return RunRecord(
        url=storage.url,
        started=day[1].decode() if day else "",
        steps=[each for each in records if isinstance(each, StepRecord)],
        epochs=[each for each in records if isinstance(each, EpochRecord)],
        evaluations=[each for each in records if isinstance(each, EvalRecord)],
        final=next((each for each in ends if each.global_step == last_step), None),
        last_step=last_step,
        num_damaged=len(lines) - len(written),
        config=config,
        worst=_worst(storage),
    )


def _worst(storage: Storage) -> Worst:
    """What `evaluate` left, if it ran. Raises ConfigError if that is damaged."""
    try:
        return msgspec.json.decode(storage.read(WORST), type=Worst)
    except NotFound:
        return []
    except JSON_ERRORS as error:
        raise ConfigError(
            f"{storage.url}/{WORST}: damaged ({error}); run `evaluate` again"
        ) from error


def _record_of(line: bytes) -> Record | None:
    """The record in a line of metrics.jsonl; None if the line is damaged."""
    try:
        # Not msgspec's own reader, which refuses the NaN that json writes.
        record: Record = msgspec.convert(json.loads(line), Record)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    return record


# --- drawing --------------------------------------------------------------------------------------


def render(run: RunRecord) -> bytes:
    """The page as HTML."""
    settings = [(key, value_text(value)) for key, value in values_of(run.config).items()]
    usual = {key: value_text(value) for key, value in values_of(TrainConfig()).items()}
    return page.render(
        "trainer.tools",
        "report.html",
        run=run,
        addresses=[url for url, _ in mixed_sets(run.config.mix)] or [run.config.manifest or ""],
        smoothing=SMOOTHING,
        plots=_plots(run),
        changed=[(key, text) for key, text in settings if text != usual[key]],
        settings=[(key, text) for key, text in settings if text == usual[key]],
        max_rows=MAX_ROWS,
        advice=advice,
    )


def _plots(run: RunRecord) -> list[Plot]:
    steps, epochs = run.steps, run.epochs
    per_epoch = max(epochs[0].global_step, 1) / (epochs[0].epoch + 1) if epochs else 1.0

    def points(records: Sequence[Any], name: str, scale: float = 1.0) -> list[plots.Point]:
        return [(each.global_step / per_epoch, scale * getattr(each, name)) for each in records]

    def smooth(name: str, scale: float = 1.0) -> list[plots.Point]:
        smoothed, mean, weight = [], 0.0, 0.0
        for x, y in points(steps, name, scale):
            if math.isfinite(y):
                mean = SMOOTHING * mean + (1 - SMOOTHING) * y
                weight = SMOOTHING * weight + 1 - SMOOTHING
                smoothed.append((x, mean / weight))
        return smoothed

    # a run that resumes may take another one
    splits = dict.fromkeys(each.split for each in run.evaluations)
    of_split = {name: [each for each in run.evaluations if each.split == name] for name in splits}
    series_by_title = {
        "Loss": (
            {"training": smooth("loss")}
            | {name: points(records, "loss") for name, records in of_split.items()}
        ),
        "Accuracy, %": (
            {"training": smooth("top1", 100)}
            | {name: points(records, "top1", 100) for name, records in of_split.items()}
            | {
                f"{name}, top-5": points(records, "top5", 100)
                for name, records in of_split.items()
                if any(each.top5 < 1 for each in records)
            }
        ),
        "Learning rate": {"learning rate": points(steps, "learning_rate")},
        "Samples per second of the first host": {
            "now": points(steps, "rate"),
            "since the epoch began": points(steps, "global_rate"),
        },
        "Time of an epoch, %": {"waiting for data": points(epochs, "input_wait_percent")},
    }
    drawn = {
        title: {name: points for name, points in series.items() if points}
        for title, series in series_by_title.items()
    }
    return [
        plots.curves(title, series, x_label="epoch" if epochs else "step")
        for title, series in drawn.items()
        if series
    ]
