"""What a run says about itself: rates, exact weighted accuracies, and lines for people, programs and TensorBoard.

Each host appends to `logs/host-000.log`; the first one also writes `metrics.jsonl` and TensorBoard events. All of it
goes to the local disk: nothing here waits for a network.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from shardset.errors import ConfigError
from shardset.storage.base import Storage, os_errors_as_storage_errors
from trainer.errors import NotFinite, PlanMismatch
from trainer.record import merge_logs
from trainer.record.loggers import Logger

METRICS = "metrics.jsonl"
LOGS = "logs/"
EVENTS = "tensorboard"
FLUSH_S = 5
"""How long events wait at most; so long its thread sleeps, too, if Ctrl-C came at the moment in which it was woken."""

SMOOTHING = 0.4
INPUT_BOUND_PERCENT = 10.0

_LOG_NAME = re.compile(r"logs/host-(\d+)\.log")


def log_name(host: int) -> str:
    """`logs/host-000.log`."""
    return f"{LOGS}host-{host:03d}.log"


# --- numbers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over samples, each counted with its weight: pads weigh nothing."""

    loss: float = 0.0
    weight: float = 0.0
    top1: float = 0.0
    top5: float = 0.0

    def add(self, rows: torch.Tensor) -> "Totals":
        """The sums of these samples and those in the rows [n, 4] of some steps."""
        return Totals(*(old + new for old, new in zip(dataclasses.astuple(self), rows.sum(0).tolist(), strict=True)))

    def mean(self, name: str) -> float:
        """The mean of `loss`, `top1` or `top5` over samples."""
        total: float = getattr(self, name)
        return total / max(1.0, self.weight)


def check_evaluation(totals: Totals, num_samples: int) -> None:
    """Raises PlanMismatch unless every sample was evaluated, NotFinite if their loss is no number."""
    if int(totals.weight) != num_samples:
        raise PlanMismatch(f"evaluated {int(totals.weight)} samples, the split has {num_samples}")
    if not math.isfinite(totals.loss):
        raise NotFinite(
            f"the loss of the evaluation is {totals.loss}, so its accuracy means nothing: lower the learning "
            "rate, or clip gradients with --set regularize.clip_norm=1; a run goes on from the checkpoint before it"
        )


def stats_row(losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One step's sums as a float32 [4] on the device, in the order of `Totals`."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = best.eq(labels.unsqueeze(1)).float() * weights.unsqueeze(1)
    return torch.stack([(losses * weights).sum(), weights.sum(), hits[:, 0].sum(), hits.sum()])


class Rates:
    """Samples a second: `rate` is a moving average over intervals, `global_rate` counts from the start.

    Time from a `mark` or `add` to the next `add` counts; what comes before a `mark` (compiling, saving) does not.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start: float | None = None
        self.rate = 0.0
        self.samples = 0
        self.seconds = 0.0

    @property
    def global_rate(self) -> float:
        """Samples a second over all time that counts."""
        return self.samples / self.seconds if self.seconds else 0.0

    def mark(self) -> None:
        """Time counts from here."""
        self._start = self._clock()

    def add(self, samples: int) -> None:
        """Counts samples since the last `mark` or `add`; without a mark they don't count, nor does their time."""
        now = self._clock()
        if self._start is not None and now > self._start:
            self._count(samples, now - self._start)
        self._start = now

    def _count(self, samples: int, seconds: float) -> None:
        fresh = samples / seconds
        self.rate = SMOOTHING * fresh + (1 - SMOOTHING) * self.rate if self.samples else fresh
        self.samples += samples
        self.seconds += seconds


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One interval of steps up to and with `step`. Loss and accuracy are means over the samples of all replicas.

    `rate` and `global_rate` are this host's samples a second, without compiling, evaluating and saving.
    """

    device: str
    epoch: int
    step: int
    global_step: int
    loss: float
    top1: float
    rate: float
    global_rate: float
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch. `samples` and `key_digest` are those of all hosts and equal the plan's."""

    device: str
    epoch: int
    global_step: int
    samples: int
    replica_samples: int
    key_digest: str
    loss: float
    top1: float
    reduced_global_rate: float
    input_wait_percent: float
    busy_percent: float
    compilations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One evaluation: every sample of the split once."""

    epoch: int
    global_step: int
    samples: int
    loss: float
    top1: float
    top5: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRecord:
    """The whole run, as seen by the process that ended it; `accuracy` is the top-1 of the last evaluation."""

    accuracy: float | None
    best_accuracy: float | None
    best_epoch: int | None
    epochs: int
    global_step: int
    reduced_global_rate: float
    seconds: float
    seconds_to_target: float | None


Record = StepRecord | EpochRecord | EvalRecord | FinalRecord
_KINDS: dict[type, str] = {StepRecord: "step", EpochRecord: "epoch", EvalRecord: "eval", FinalRecord: "final"}


def line_of(record: Record) -> str:
    """`step device=cpu epoch=1 step=9 ... time=12:03:55`, without the time. People count epochs from 1."""
    fields = dataclasses.asdict(record)
    counted = {name: fields[name] + 1 for name in ("epoch", "best_epoch") if fields.get(name) is not None}
    return " ".join([_KINDS[type(record)], *(f"{name}={_short(value)}" for name, value in (fields | counted).items())])


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def advice(input_wait_percent: float) -> str | None:
    """What to change when the device waits for data, None when it does not."""
    if input_wait_percent < INPUT_BOUND_PERCENT:
        return None
    return (
        f"input-bound: steps waited {input_wait_percent:.0f} % of the time for data. Compare with "
        "`python -m trainer bench-input`; store smaller images (`python -m pipelines build --resize`), use a machine "
        "with more CPU cores per device, or read from a bucket in the same region"
    )


# --- writing ---------------------------------------------------------------------------------------------------------


class RunLog:
    """Writes records; `master` also to standard output, to `metrics.jsonl` and to TensorBoard.

    A terminal shows sentences and progress, and records only with `show_records`.
    """

    def __init__(
        self, folder: Path, host: int, *, master: bool, show_records: bool = False, logger: Logger | None = None
    ) -> None:
        path = folder / log_name(host)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._master = master
        self._log = _appended(path)
        self._lines = _appended(folder / METRICS) if master else None
        self._events = _event_writer(folder / EVENTS) if master else None
        self._events_at = str(folder / EVENTS)
        self._logger = logger
        self._progress = Progress() if master else None
        self._prints_records = show_records or not sys.stdout.isatty()

    def note(self, text: str, detail: str = "") -> None:
        """A sentence for people; the log adds the detail."""
        self._append(text + detail)
        self._print(text)

    def summary(self, text: str) -> None:
        """A line for people in place of records; only where records are not printed."""
        if not self._prints_records:
            self._print(text)

    def log_error(self, error: BaseException) -> None:
        """Writes what ended the run to the log alone: whoever started the run tells the terminal."""
        self._log.write(f"{_now().isoformat()} {type(error).__name__}: {error}\n")

    def record(self, record: Record) -> None:
        """A record for everyone."""
        line = f"{line_of(record)} time={_now():%H:%M:%S}"
        self._append(line)
        if self._prints_records:
            self._print(line)
        if self._lines:
            values = {"kind": _KINDS[type(record)], "time": _now().isoformat(), **dataclasses.asdict(record)}
            _append(self._lines, json.dumps(values))
        if not isinstance(record, FinalRecord):
            self._send(record)

    def progress(self, text: str) -> None:
        """A line that the next one replaces, on a terminal only."""
        if self._progress:
            self._progress.show(text)

    def close(self) -> None:
        """Flushes everything; raises StorageError if a file can't take it."""
        with contextlib.ExitStack() as exits:
            if self._events:
                exits.enter_context(os_errors_as_storage_errors(self._events_at))
                exits.callback(self._events.close)
            for file in filter(None, (self._log, self._lines)):
                exits.enter_context(os_errors_as_storage_errors(file.name))
                exits.callback(file.close)
            if self._logger:
                exits.callback(self._logger.close)
            if self._progress:
                self._progress.close()

    def _append(self, text: str) -> None:
        _append(self._log, f"{_now().isoformat()} {text}")

    def _print(self, text: str) -> None:
        if self._progress:
            self._progress.clear()
            print(text, flush=True)

    def _send(self, record: StepRecord | EpochRecord | EvalRecord) -> None:
        values = dataclasses.asdict(record).items()
        numbers = {f"{_KINDS[type(record)]}/{name}": value for name, value in values if isinstance(value, float)}
        if self._events:
            with os_errors_as_storage_errors(self._events_at):
                for name, value in numbers.items():
                    self._events.add_scalar(name, value, record.global_step)
        if self._logger:
            self._logger.log(numbers, record.global_step)


class Progress:
    """One line on a terminal that is rewritten in place; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = 0
        self._terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replaces the line, cut to the width of the terminal."""
        if self._terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r{text:<{self._shown}}", end="", file=sys.stderr, flush=True)
            self._shown = len(text)

    def clear(self) -> None:
        """Removes the line."""
        if self._shown:
            print(f"\r{'':<{self._shown}}\r", end="", file=sys.stderr, flush=True)
            self._shown = 0

    close = clear


def _appended(path: Path) -> TextIO:
    """The file, to append lines to; one that a full disk or a loss of power has cut gets its end first."""
    is_cut = path.exists() and path.stat().st_size > 0 and _last_byte(path) != b"\n"
    file = path.open("a", encoding="utf-8")
    if is_cut:
        file.write("\n")
    return file


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _append(file: TextIO, line: str) -> None:
    """Raises StorageError if the file can't take the line."""
    with os_errors_as_storage_errors(file.name):
        file.write(line + "\n")
        file.flush()


def _event_writer(folder: Path) -> Any:
    # Imported late: it takes a second, and only one process of a run needs it. It writes from a thread of its own.
    from torch.utils import tensorboard

    writer: Any = tensorboard.SummaryWriter  # has no types
    return writer(str(folder), flush_secs=FLUSH_S)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


# --- reading ---------------------------------------------------------------------------------------------------------


def merged_logs(storage: Storage) -> Iterator[str]:
    """The lines of all hosts' logs by time, each as `TIME host-000 TEXT`; raises ConfigError if there are none."""
    logs = [(match[1], stat.name) for stat in storage.list(LOGS) if (match := _LOG_NAME.fullmatch(stat.name))]
    if not logs:
        raise ConfigError(
            f"{storage.url}: no {log_name(0)} there, expected the folder of a run; give the --run-dir of "
            "`python -m trainer train`"
        )
    return merge_logs.merged((f"host-{host}", storage.read(name).decode("utf-8", "replace")) for host, name in logs)


def records(data: bytes) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`: what a resumed run wrote again replaces what was there.

    A last line that a kill cut short is left out.
    """
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for line in data.decode("utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            values = json.loads(line)
            newest[values["kind"], values["global_step"]] = values
    return list(newest.values())
