"""Counts what a process trains on and how fast, and turns the counts into records."""

import datetime
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardset.program import count
from trainer.data.device_feed import DeviceBatch, DeviceFeed
from trainer.data.epochs import DIGEST_MASK, SampleDigest
from trainer.data.step_rows import OUTCOME, SUMS, Totals
from trainer.errors import NotFinite
from trainer.plan import Plan
from trainer.run_folder.checkpoint_state import CheckpointState, Position
from trainer.runtime.base import Runtime
from trainer.telemetry.metrics import (
    EpochRecord,
    EvalRecord,
    FinalRecord,
    RunLog,
    StepRecord,
    advice,
)

PROFILE = "profile"
"""The folder for traces in the run folder."""


SMOOTHING = 0.4
"""Weight of the newest interval in a moving average."""


@dataclass(slots=True)
class Rates:
    """Samples a second: `rate` is a moving average over intervals, `global_rate` the average of
    all.

    An interval ends with `add` and begins at the `add` or `mark` before it; the time before a
    `mark` does not count.
    """

    rate: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    start: float | None = None

    @property
    def global_rate(self) -> float:
        """Samples a second over all intervals."""
        return self.samples / self.seconds if self.seconds else 0.0

    def mark(self) -> None:
        """Begins an interval."""
        self.start = time.perf_counter()

    def add(self, samples: int, now: float) -> None:
        """Ends an interval with so many samples and begins the next.

        Without a begun interval they don't count.
        """
        start, self.start = self.start, now
        if start is None or now <= start:
            return
        newest = samples / (now - start)
        self.rate = SMOOTHING * newest + (1 - SMOOTHING) * self.rate if self.samples else newest
        self.samples += samples
        self.seconds += now - start


class Telemetry:
    """Counts samples, losses, rates and waiting times of this process, and writes the records of a
    run.

    The sums of a step stay on the device until a `report` fetches them.
    `epoch_totals` are the sums of the epoch over all hosts, up to the last report. `feed` is what
    the run waits for.
    """

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan,
        log: RunLog,
        eval_split: str,
    ) -> None:
        self._runtime, self._plan, self._log = runtime, plan, log
        self._eval_split = eval_split
        self._pending: list[tuple[DeviceBatch, torch.Tensor, float]] = []
        self._has_reported = self._is_tracing = False
        self._pace_from: tuple[int, float] | None = None
        self.feed: DeviceFeed | None = None
        self.start_epoch()

    def restore(self, state: CheckpointState) -> None:
        """Continues to count in the epoch of a checkpoint."""
        # The digest in the checkpoint covers all hosts, so only the first host counts it.
        if self._runtime.is_master:
            self._seen = SampleDigest(*state["seen"])
        self.epoch_totals = Totals(
            *state["epoch_totals"], outcomes=(state["outcomes"].numpy().view(OUTCOME),)
        )

    def start_epoch(self) -> None:
        """Sets the counts of the epoch to zero."""
        self._seen, self.epoch_totals, self._rates = SampleDigest(), Totals(), Rates()
        self._replica_samples = 0
        self._epoch_started = time.perf_counter()
        self._wait_s_before = self._wait_s()

    def add(self, batch: DeviceBatch, row: torch.Tensor) -> None:
        """Counts a step. `row` is what it returned (see Learner.train_step)."""
        # Without the tensors, which would occupy the device until the next report.
        self._pending.append((replace(batch, tensors={}), row, time.perf_counter()))
        self._seen = self._seen.add(batch.real_ids)

    def pause(self) -> None:
        """Leaves the time since the last report out of the rates."""
        self._rates.mark()

    def seen_by_all(self) -> SampleDigest:
        """The digest of the samples that all hosts trained on in this epoch.

        Every host must call it.
        """
        samples, digest = self._runtime.sum_hosts([self._seen.samples, self._seen.digest])
        return SampleDigest(samples, digest & DIGEST_MASK)

    def profile(self, step: int | None, folder: Path) -> None:
        """Starts or ends the trace of `profile_steps`.

        Call it before every step, and with None at the end.
        """
        wanted = step is not None and self._plan.is_profiled(step)
        if wanted != self._is_tracing:
            (self._runtime.start_trace if wanted else self._runtime.stop_trace)(folder)
            self._is_tracing = wanted

    # --- records ----------------------------------------------------------------------------------

    def report_is_due(self, step: int) -> bool:
        """Whether a report is due: after the first step, so that compiling is in no rate, and one
        step after each interval.
        """
        is_late = self._plan.interval_is_over(step) and len(self._pending) > 1
        return is_late or not self._has_reported

    def report(self, step: int, *, with_newest: bool) -> None:
        """Fetches and logs the sums of the steps before `step`, if there are any.

        Raises NotFinite with the samples.

        Without the newest, unless it is the only one, the device computes that one meanwhile.
        """
        num_left = int(not with_newest and len(self._pending) > 1)
        num_done = len(self._pending) - num_left
        done, self._pending = self._pending[:num_done], self._pending[num_done:]
        if not done:
            return
        rows = self._runtime.fetch([row for _, row, _ in done])
        # The time at which the last of them was computed; where steps block, the newest has been
        # since.
        now = done[-1][2] if self._runtime.steps_block else time.perf_counter()
        batches = [batch for batch, _, _ in done]
        for loss, batch in zip(rows[:, SUMS.index("loss")].tolist(), batches, strict=True):
            if not math.isfinite(loss):
                raise NotFinite(
                    f"the loss is {loss} in epoch {batch.epoch + 1} step {batch.step}; this host's"
                    f" samples were {batch.ids.tolist()}; nothing was saved since: lower the"
                    " learning rate, or look at these samples"
                )
        num_samples = sum(len(batch.real_ids) for batch in batches)
        self._rates.add(num_samples, now)
        self._replica_samples += num_samples
        self.epoch_totals = self.epoch_totals.add(rows)
        self._has_reported = True
        global_step, interval = step - num_left - 1, Totals().add(rows)
        epoch, number = divmod(global_step, self._plan.steps_per_epoch)
        record = StepRecord(
            device=str(self._runtime.device),
            epoch=epoch,
            step=number,
            global_step=global_step,
            loss=interval.mean("loss"),
            top1=interval.mean("top1"),
            rate=self._rates.rate,
            global_rate=self._rates.global_rate,
            learning_rate=self._plan.rate_at(global_step),
        )
        self._log.record(record)
        # none is known before the second report
        rate = f" {record.rate:.0f} samples/s" if record.rate else ""
        self._log.progress(
            f"{self._plan.name_of(epoch)} step {number + 1}/{self._plan.steps_per_epoch} "
            f"loss {record.loss:.4f}{rate}{self._time_left(global_step + 1)}"
        )

    def log_epoch(self, position: Position, seen: SampleDigest) -> None:
        """Logs the epoch that ends here, with advice if it waited for data.

        Every host must call it.
        """
        seconds = max(1e-9, time.perf_counter() - self._epoch_started)
        input_wait_percent = 100 * (self._wait_s() - self._wait_s_before) / seconds
        # Hosts can sum integers only, so the rate is sent in thousandths.
        rate = self._runtime.sum_hosts([round(1000 * self._rates.global_rate)])[0] / 1000
        self._log.record(
            EpochRecord(
                device=str(self._runtime.device),
                epoch=position.closed_epochs,
                global_step=position.step,
                samples=seen.samples,
                replica_samples=self._replica_samples,
                key_digest=seen.text,
                loss=self.epoch_totals.mean("loss"),
                top1=self.epoch_totals.mean("top1"),
                reduced_global_rate=rate,
                input_wait_percent=input_wait_percent,
                compilations=self._runtime.compilations,
                rate_per_device=rate / self._runtime.num_devices,
            )
        )
        if (text := advice(input_wait_percent)) is not None:
            self._log.note(text)
        self._evaluation_started = time.perf_counter()
        self._log.progress(
            f"epoch {position.closed_epochs + 1}/{self._plan.config.epochs} evaluating"
        )

    def log_evaluation(self, position: Position, totals: Totals) -> None:
        """Logs the evaluation that followed `log_epoch`."""
        self._log.record(
            EvalRecord(
                split=self._eval_split,
                epoch=position.closed_epochs,
                global_step=position.step,
                samples=int(totals.weight),
                loss=totals.mean("loss"),
                top1=totals.mean("top1"),
                top5=totals.mean("top5"),
                seconds=time.perf_counter() - self._evaluation_started,
            )
        )
        epoch = self._plan.name_of(position.closed_epochs)
        self._log.note(f"{epoch}: {self.epoch_totals}; {self._eval_split}: {totals}")

    def log_final(self, position: Position, seconds: float) -> None:
        """Logs the complete run."""
        self._log.record(
            FinalRecord(
                split=self._eval_split,
                accuracy=position.last_top1,
                best_accuracy=position.best_top1,
                best_epoch=position.best_epoch,
                epochs=position.closed_epochs,
                global_step=position.step,
                seconds=seconds,
                seconds_to_target=position.seconds_to_target,
            )
        )
        trained = (
            f"after {count(position.step, 'step')} ({count(position.closed_epochs, 'epoch')}) in"
            f" {seconds:.0f} s"
        )
        if position.last_top1 is None or position.best_epoch is None:
            self._log.note(f"done {trained}; no epoch was completed, so nothing was evaluated")
            return
        best = f"best {position.best_top1:.4f} in epoch {position.best_epoch + 1}"
        self._log.note(f"{self._eval_split} accuracy {position.last_top1:.4f} ({best}) {trained}")

    def _time_left(self, step: int) -> str:
        """`, 0:12:34 left`: at the pace since the first report,
        with evaluations and checkpoints.
        """
        now = time.perf_counter()
        if self._pace_from is None:
            self._pace_from = step, now
            return ""
        first, started = self._pace_from
        left = max(0, self._plan.stop - step)
        seconds = round((now - started) / max(1, step - first) * left)
        return f", {datetime.timedelta(seconds=seconds)} left"

    def _wait_s(self) -> float:
        return self.feed.wait_s if self.feed else 0.0
