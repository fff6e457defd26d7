"""How far a build is, read from what stands in the plan: the same for every runner, wherever its workers are."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from pipelines.check.verify import VerifyProgress as Verified
from pipelines.plan.job import PlanFile, read_record
from pipelines.terminal import plain
from shardset.errors import StorageError
from shardset.format import naming
from shardset.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a build is; `num_shards` and `num_samples` are 0 until the plan is made."""

    units_done: int
    num_units: int
    shards_done: int
    num_shards: int
    num_samples: int
    bytes_done: int
    seconds: float

    @property
    def samples_done(self) -> int:
        """About how many samples are in finished shards."""
        return self.num_samples * self.shards_done // max(1, self.num_shards)


class BuildProgress(Protocol):
    """Shows a Standing, or says something."""

    def show(self, standing: Standing) -> None: ...
    def say(self, line: str) -> None: ...
    def close(self) -> None: ...


class ProgressWatcher:
    """Looks at the output every `interval_s` seconds in a thread of its own and shows what it finds."""

    def __init__(
        self, output: Storage, num_units: int, progress: BuildProgress | None, interval_s: float | None = None
    ):
        self._output, self._num_units, self._progress = output, num_units, progress
        self._interval_s = interval_s or (5.0 if output.reads_at_once > 1 else 0.5)
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._first: int | None = None
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
            self._look()
            # Listing a very large output takes long: never spend more than a tenth of the time on it.
            pause = max(self._interval_s, 9 * (time.monotonic() - started))
        self._look()

    def _look(self) -> None:
        assert self._progress
        try:
            standing = self._standing()
        except StorageError as error:
            print(f"progress is not known right now: {error}", file=sys.stderr)
            return
        self._progress.show(standing)

    def _standing(self) -> Standing:
        plan = read_record(self._output, naming.PLAN, PlanFile)
        splits = list(plan.splits.values()) if plan else []
        shards = [found for found in self._output.list() if naming.is_shard_file(found.name)] if plan else []
        tars = [found.num_bytes for found in shards if found.name.endswith(".tar")]
        return Standing(
            units_done=sum(1 for _ in self._output.list(naming.UNITS)),
            num_units=self._num_units,
            shards_done=sum(1 for _ in self._output.list(naming.RECORDS)),
            num_shards=sum(split.num_shards for split in splits),
            num_samples=sum(split.num_stored for split in splits),
            bytes_done=sum(tars),
            seconds=time.monotonic() - self._started,
        )


class TerminalProgress:
    """Two bars: units indexed, samples written."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(*_columns(), console=console)
        self._units: TaskID = self._bars.add_task("index units", total=None, rate="")
        self._samples: TaskID = self._bars.add_task("write samples", total=None, rate="")
        self._bars.start()

    def show(self, standing: Standing) -> None:
        self._bars.update(self._units, completed=standing.units_done, total=standing.num_units)
        if standing.num_samples:
            self._bars.update(
                self._samples, completed=standing.samples_done, total=standing.num_samples, rate=rates(standing)
            )

    def say(self, line: str) -> None:
        self._bars.console.print(plain(line), highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


class PlainProgress:
    """A line every `interval_s` seconds, and only when something changed."""

    def __init__(self, console: Console, interval_s: float = 5.0) -> None:
        self._console, self._interval_s = console, interval_s
        self._last, self._shown = 0.0, ""

    def show(self, standing: Standing) -> None:
        line = (
            f"indexed {standing.units_done}/{standing.num_units} units"
            if not standing.num_samples
            else f"written {standing.shards_done}/{standing.num_shards} shards, {rates(standing)}, {left(standing)}"
        )
        if line != self._shown and standing.seconds - self._last >= self._interval_s:
            self._console.print(line, highlight=False)
            self._last, self._shown = standing.seconds, line

    def say(self, line: str) -> None:
        self._console.print(plain(line), highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


@contextmanager
def verifying(console: Console) -> Iterator[Callable[[Verified], None]]:
    """A bar of shards while a set is verified; nothing where there is no terminal."""
    with Bars(*_columns(), console=console, disable=not console.is_terminal) as bars:
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


def rates(standing: Standing) -> str:
    """Images a second and megabytes so far, over the whole run."""
    seconds = max(standing.seconds, 1e-3)
    return f"{standing.samples_done / seconds:,.0f} images/s, {standing.bytes_done / 1e6:,.0f} MB"


def left(standing: Standing) -> str:
    """About how long it will still take, at the rate of the whole run."""
    if not standing.samples_done:
        return "time left unknown"
    seconds = standing.seconds * (standing.num_samples - standing.samples_done) / standing.samples_done
    return f"about {seconds:,.0f} s left"


def for_console(console: Console) -> BuildProgress:
    """Bars on a terminal, lines elsewhere."""
    return TerminalProgress(console) if console.is_terminal else PlainProgress(console)
