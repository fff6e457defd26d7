"""Shows the progress of a build, which it reads from the files of the plan: that works with every
runner.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from pipelines.check.verify import ShowProgress
from pipelines.plan import files, paths
from pipelines.plan.plan_records import PlanFile
from shardset.errors import StorageError
from shardset.storage.base import Storage
from shardset.terminal import plain


class BuildProgress:
    """Prints the progress of a build, a line every `interval_s` seconds if something changed, and
    single messages.
    """

    def __init__(self, console: Console, interval_s: float = 5.0) -> None:
        self.console, self.interval_s = console, interval_s
        self._shown = ""

    def print(self, message: str) -> None:
        """Prints a message, unless it is the last one again."""
        if message != self._shown:
            self.console.print(plain(message), highlight=False, soft_wrap=True)
            self._shown = message


@contextmanager
def watched(
    output: Storage, num_units: int, progress: BuildProgress | None, *, writes: bool = True
) -> Iterator[None]:
    """A block during which a thread shows the progress of a build;
    of a dry run without `writes`.
    """
    if progress is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(output, num_units, progress, writes, stop), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(
    output: Storage, num_units: int, progress: BuildProgress, writes: bool, stop: threading.Event
) -> None:
    begun, pause = time.monotonic(), progress.interval_s
    while not stop.wait(pause):
        started = time.monotonic()
        try:
            progress.print(_line(output, num_units, writes, started - begun))
        except StorageError as error:
            progress.print(f"the progress is unknown at the moment: {error}")
        # Listing a large output takes long: spend at most a tenth of the time on it.
        pause = max(progress.interval_s, 9 * (time.monotonic() - started))


def _line(output: Storage, num_units: int, writes: bool, seconds: float) -> str:
    """The progress in words, with rates and time left of the complete run."""
    plan = files.find_record(output, paths.PLAN, PlanFile) if writes else None
    if plan is None:
        return f"indexed {sum(1 for _ in output.list(paths.UNITS))}/{num_units} units"
    num_done = sum(1 for _ in output.list(paths.RECORDS))
    num_shards = sum(split.num_shards for split in plan.splits.values())
    num_samples = sum(split.num_stored for split in plan.splits.values()) * num_done // num_shards
    left = (
        f"about {seconds * (num_shards - num_done) / num_done:,.0f} s left"
        if num_done
        else "time left unknown"
    )
    return (
        f"written {num_done}/{num_shards} shards, {num_samples / max(seconds, 1e-3):,.0f} images/s,"
        f" {left}"
    )


def verifying(console: Console) -> ShowProgress:
    """Prints how many shards are verified, every few seconds; nothing without a terminal."""
    progress, started = BuildProgress(console), time.monotonic()
    shown = started

    def show(done: int, total: int, num_bytes: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if console.is_terminal and now - shown >= progress.interval_s:
            shown = now
            rate = num_bytes / 1e6 / (now - started)
            progress.print(f"verified {done}/{total} shards, {rate:,.0f} MB/s")

    return show
