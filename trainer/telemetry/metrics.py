"""The records of a run, and where they go: lines for people, JSON for programs, TensorBoard.

Every host appends to its own `logs/host-000.log`; the first one also writes `metrics.jsonl` and
TensorBoard events. All of it goes to the local disk: nothing here waits for a network.
"""

import contextlib
import datetime
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

import msgspec

from shardset.errors import printable
from shardset.order.state import StateCount
from shardset.prepared import prepared
from shardset.storage.base import os_errors_as_storage_errors
from trainer.data.step_rows import Totals
from trainer.errors import EpochMismatch, NotFinite
from trainer.run_folder.names import LOGS, METRICS, log_name
from trainer.telemetry.loggers import open_events

INPUT_BOUND_PERCENT = 10.0


def check_evaluation(totals: Totals, num_samples: int) -> None:
    """Raises EpochMismatch unless every sample was evaluated,
    NotFinite if the loss is not finite.
    """
    if int(totals.weight) != num_samples:
        raise EpochMismatch(f"evaluated {int(totals.weight)} samples, the split has {num_samples}")
    if not math.isfinite(totals.loss):
        raise NotFinite(
            f"the loss of the evaluation is {totals.loss}, so its accuracy means nothing; lower the"
            " learning rate, or clip gradients with --set regularize.clip_norm=1; the same command"
            " resumes from the checkpoint before"
        )


# --- records --------------------------------------------------------------------------------------


@prepared
class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """An interval of steps that ends with `step`.

    Loss and accuracy are means over the samples of all replicas.

    `rate` and `global_rate` are samples per second of this host, without the time for compiling,
    evaluating and saving.
    """

    device: str
    epoch: StateCount
    step: int
    global_step: StateCount
    loss: float
    top1: float
    rate: float
    global_rate: float
    learning_rate: float


@prepared
class EpochRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="epoch"):
    """One epoch. `samples` and `key_digest` cover all hosts and equal the expected ones.

    `rate_per_device` is `reduced_global_rate` over all devices.
    """

    device: str
    epoch: StateCount
    global_step: StateCount
    samples: int
    replica_samples: int
    key_digest: str
    loss: float
    top1: float
    reduced_global_rate: float
    input_wait_percent: float
    compilations: int
    rate_per_device: float


@prepared
class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="eval"):
    """One evaluation: every sample of the split once."""

    split: str
    epoch: StateCount
    global_step: StateCount
    samples: int
    loss: float
    top1: float
    top5: float
    seconds: float


@prepared
class FinalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="final"):
    """The complete run, as seen by the process that ended it.

    `accuracy` is the top-1 of the last evaluation.
    """

    split: str
    accuracy: float | None
    best_accuracy: float | None
    best_epoch: int | None
    epochs: int
    global_step: StateCount
    seconds: float
    seconds_to_target: float | None


Record = StepRecord | EpochRecord | EvalRecord | FinalRecord


def line_of(record: Record) -> str:
    """`step device=cpu epoch=1 step=9 ... time=12:03:55`, without the time.

    People count epochs from 1.
    """
    values = msgspec.to_builtins(record)
    kind = values.pop("kind")
    values |= {
        name: values[name] + 1 for name in ("epoch", "best_epoch") if values.get(name) is not None
    }
    texts = {
        name: f"{value:.6g}" if isinstance(value, float) else value
        for name, value in values.items()
    }
    return " ".join([kind, *(f"{name}={text}" for name, text in texts.items())])


def advice(input_wait_percent: float) -> str | None:
    """What to change if the device waits for data; None if it does not."""
    if input_wait_percent < INPUT_BOUND_PERCENT:
        return None
    return (
        f"input-bound: steps waited {input_wait_percent:.0f} % of the time for data. Compare with"
        " `shardset bench-input`; store smaller images (`shardset build"
        " --resize-shorter`), use a machine with more CPU cores per device, or read from a"
        " bucket in the same region"
    )


# --- writing --------------------------------------------------------------------------------------


class RunLog:
    """Writes the log of a host; on the first one also `metrics.jsonl` and events, and to stdout.

    Stdout has the sentences, and records only with `show_records`; a terminal has progress too.
    """

    def __init__(self, folder: Path, host: int = 0, *, show_records: bool = False) -> None:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._is_master, self._prints_records = host == 0, show_records
        self._log = _open_for_appending(folder / log_name(host))
        self._lines = _open_for_appending(folder / METRICS) if self._is_master else None
        self._events: Any = None

    def start(self, step: int) -> None:
        """Opens the events of a run that has taken so many steps; before its first record."""
        self._events = open_events(self._folder, step) if self._is_master else None

    def note(self, text: str, detail: str = "") -> None:
        """Writes a sentence for people; the log adds the detail."""
        _append(self._log, f"{_now()} {printable(text)}{detail}")
        self._print(printable(text))

    def log_error(self, error: BaseException) -> None:
        """Writes the error that ended the run, to the log only: the command prints it."""
        self._log.write(printable(f"{_now()} {type(error).__name__}: {error}") + "\n")

    def record(self, record: Record) -> None:
        """Writes a record to every output."""
        now = _now()
        line = f"{line_of(record)} time={now[11:19]}"
        _append(self._log, f"{now} {line}")
        if self._prints_records:
            self._print(line)
        values = msgspec.to_builtins(record)
        kind = values["kind"]
        if self._lines:
            _append(self._lines, json.dumps({"kind": kind, "time": now, **values}))
        if self._events and not isinstance(record, FinalRecord):
            with os_errors_as_storage_errors(self._events.log_dir):
                # steps taken, also for the record of a step, which has its number from 0
                step = record.global_step + isinstance(record, StepRecord)
                for name, value in values.items():
                    if isinstance(value, float):
                        self._events.add_scalar(f"{kind}/{name}", value, step)

    def progress(self, text: str) -> None:
        """Shows a line that the next one replaces, on a terminal only."""
        if self._is_master and sys.stderr.isatty():
            text = text[: shutil.get_terminal_size().columns - 1]
            # which erases the rest of the line
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Flushes and closes all outputs. Raises StorageError if a file can't be written."""
        self.progress("")
        # An exit stack: one file that fails must not keep the others open.
        with contextlib.ExitStack() as exits:
            for file in filter(None, (self._log, self._lines)):
                exits.enter_context(os_errors_as_storage_errors(file.name))
                exits.callback(file.close)
            if self._events:
                exits.enter_context(os_errors_as_storage_errors(self._events.log_dir))
                exits.callback(self._events.close)

    def _print(self, text: str) -> None:
        if self._is_master:
            self.progress("")
            print(text, flush=True)


def _open_for_appending(path: Path) -> TextIO:
    """The file, opened to append lines.

    Ends a last line that a full disk or a loss of power has cut.
    """
    is_cut = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
    file = path.open("a", encoding="utf-8")
    if is_cut:
        file.write("\n")
    return file


def _append(file: TextIO, line: str) -> None:
    """Appends a line at once. Raises StorageError if the file can't be written."""
    with os_errors_as_storage_errors(file.name):
        file.write(line + "\n")
        file.flush()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
