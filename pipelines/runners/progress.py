"""Shows the progress of a build, which it reads from the files of the plan: that works with every runner."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from pipelines.check.verify import VerifyProgress
from pipelines.plan import files, paths
from pipelines.plan.records import PlanFile
from pipelines.terminal import plain
from shardset.errors import StorageError
from shardset.format import naming
from shardset.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildState:
    """The progress of a build; `num_shards` and `num_samples` are 0 until the plan exists."""

    units_done: int
    num_units: int
    shards_done: int
    num_shards: int
    num_samples: int
    bytes_done: int
    seconds: float

    @property
    def samples_done(self) -> int:
        """The number of samples in finished shards, approximately."""
        return self.num_samples * self.shards_done // max(1, self.num_shards)


class BuildProgress:
    """Prints the progress of a build, a line every `interval_s` seconds if something changed, and single messages."""

    def __init__(self, console: Console, interval_s: float = 5.0) -> None:
        self._console, self._interval_s = console, interval_s
        self._last, self._shown = 0.0, ""

    def show(self, state: BuildState) -> None:
        line = (
            f"written {state.shards_done}/{state.num_shards} shards, {rates(state)}, {time_left(state)}"
            if state.num_samples
            else f"indexed {state.units_done}/{state.num_units} units"
        )
        if line != self._shown and state.seconds - self._last >= self._interval_s:
            self._console.print(line, highlight=False)
            self._last, self._shown = state.seconds, line

    def print(self, message: str) -> None:
        self._console.print(plain(message), highlight=False, soft_wrap=True)

    def close(self) -> None: ...


class TerminalProgress(BuildProgress):
    """Shows two bars on a terminal: units indexed, samples written."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bars = Progress(*_columns(), console=console)
        self._units: TaskID = self._bars.add_task("index units", total=None, rate="")
        self._samples: TaskID = self._bars.add_task("write samples", total=None, rate="")
        self._bars.start()

    def show(self, state: BuildState) -> None:
        self._bars.update(self._units, completed=state.units_done, total=state.num_units)
        if state.num_samples:
            self._bars.update(self._samples, completed=state.samples_done, total=state.num_samples, rate=rates(state))

    def close(self) -> None:
        self._bars.stop()


class ProgressWatcher:
    """Shows the progress of a build at intervals, in a thread of its own; of a dry run without `writes`."""

    def __init__(self, output: Storage, num_units: int, progress: BuildProgress | None, *, writes: bool = True):
        self._output, self._num_units, self._progress, self._writes = output, num_units, progress, writes
        self._interval_s = 5.0 if output.reads_at_once > 1 else 0.5
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ProgressWatcher":
        if self._progress:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._progress:
            self._thread.join()
            self._progress.close()

    def _run(self) -> None:
        pause = self._interval_s
        while not self._stop.wait(pause):
            started = time.monotonic()
            self._update()
            # Listing a large output takes long: spend at most a tenth of the time on it.
            pause = max(self._interval_s, 9 * (time.monotonic() - started))
        self._update()

    def _update(self) -> None:
        assert self._progress
        try:
            state = self._read_state()
        except StorageError as error:
            print(f"the progress is unknown at the moment: {error}", file=sys.stderr)
            return
        self._progress.show(state)

    def _read_state(self) -> BuildState:
        plan = files.find_record(self._output, paths.PLAN, PlanFile) if self._writes else None
        splits = plan.splits.values() if plan else ()
        shards = (stat for stat in self._output.list() if naming.is_shard_file(stat.name)) if plan else ()
        return BuildState(
            units_done=sum(1 for _ in self._output.list(paths.UNITS)),
            num_units=self._num_units,
            shards_done=sum(1 for _ in self._output.list(paths.RECORDS)),
            num_shards=sum(split.num_shards for split in splits),
            num_samples=sum(split.num_stored for split in splits),
            bytes_done=sum(stat.num_bytes for stat in shards if stat.name.endswith(".tar")),
            seconds=time.monotonic() - self._started,
        )


@contextmanager
def verifying(console: Console) -> Iterator[Callable[[VerifyProgress], None]]:
    """A progress bar of verified shards; shows nothing without a terminal."""
    with Progress(*_columns(), console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("verify shards", total=None, rate="")
        yield lambda done: bars.update(
            task, completed=done.shards_done, total=done.num_shards, rate=f"{done.bytes_done / 1e6:,.0f} MB"
        )


def _columns() -> list[ProgressColumn]:
    return [
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    ]


def rates(state: BuildState) -> str:
    """Images per second over the whole run, and megabytes so far."""
    seconds = max(state.seconds, 1e-3)
    return f"{state.samples_done / seconds:,.0f} images/s, {state.bytes_done / 1e6:,.0f} MB"


def time_left(state: BuildState) -> str:
    """The estimated time left, at the rate of the whole run."""
    if not state.samples_done:
        return "time left unknown"
    seconds = state.seconds * (state.num_samples - state.samples_done) / state.samples_done
    return f"about {seconds:,.0f} s left"


def for_console(console: Console) -> BuildProgress:
    """Shows bars on a terminal, and prints lines elsewhere."""
    return TerminalProgress(console) if console.is_terminal else BuildProgress(console)
