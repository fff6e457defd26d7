"""One process' part of a run: how far it is, the folder that it holds, and the checkpoints that it
saves.
"""

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from shlex import quote

import numpy as np
import torch

from shardset.order.state import states_from_json
from shardset.program import count
from shardset.storage.open import open_storage
from shardset.version import __version__
from trainer import config as configs
from trainer.agreement import acquire_run_folder, check_identity, doubts_about
from trainer.config import TrainConfig
from trainer.data.device_feed import DeviceBatch, DeviceFeed
from trainer.data.epochs import SampleDigest, Step, check_epoch, order_of, steps_of
from trainer.data.splits import Data, open_data
from trainer.data.step_rows import Totals
from trainer.errors import CheckpointError, Preempted
from trainer.model import batch_transforms
from trainer.model.learner import Learner, step_key
from trainer.plan import plan_of
from trainer.run_folder import checkpoint
from trainer.run_folder.checkpoint_state import CheckpointState, Position, position_of
from trainer.run_folder.upload import RunFolder
from trainer.runtime.base import Runtime
from trainer.runtime.preemption import METADATA, PreemptionNotice
from trainer.telemetry.counts import PROFILE, Telemetry
from trainer.telemetry.loggers import start_wandb
from trainer.telemetry.metrics import RunLog, check_evaluation
from trainer.telemetry.sample_losses import losses_file, losses_name

OpenData = Callable[[TrainConfig, int, int], Data]


class Run:
    """One process' part of a run: takes steps, knows what is due, saves, and resumes at the newest
    checkpoint.

    Construction takes the run folder and loads the checkpoint; leaving the context ends everything
    that it started.
    """

    def __init__(
        self, runtime: Runtime, config: TrainConfig, open_data: OpenData = open_data
    ) -> None:
        self.runtime, self.config = runtime, config
        self.data = open_data(config, runtime.host, runtime.num_hosts)
        self.plan = plan_of(config, self.data, runtime)
        self.position = Position()
        self._answer: Callable[[], bool] | None = None
        self._exits = ExitStack()
        try:
            self._take_folder()
            self._resume()
        except BaseException as error:
            self.runtime.heartbeat.leave(error)
            self._exits.close()
            raise

    def _take_folder(self) -> None:
        """Locks the run folder, and opens its log."""
        self._restart_watchdog()
        self._exits.callback(faulthandler.cancel_dump_traceback_later)
        self._notice = self._exits.enter_context(
            PreemptionNotice(METADATA if self.runtime.is_cloud else None)
        )
        storage = open_storage(self.config.run_dir)
        self._run_lock = acquire_run_folder(self.runtime, storage, self.plan.facts, self._exits)
        self._folder = RunFolder(storage, self.runtime.host, self._run_lock)
        self._exits.callback(self._folder.close)
        if self.config.wandb and self.runtime.is_master:
            self._exits.callback(start_wandb(self.config, self._folder.local).finish)
        self._log = RunLog(
            self._folder.local, self.runtime.host, show_records=self.config.show_steps
        )
        self._exits.callback(self._log.close)
        self.runtime.heartbeat.on_loss = self._log_loss
        # Logged first, so that the log of a run that is refused later shows its config too.
        devices = f"strategy {self.runtime.strategy}, {count(self.runtime.num_devices, 'device')}"
        self._log.note(f"trainer {__version__}, {devices}", f": {configs.to_json(self.config)}")

    def _resume(self) -> None:
        """Loads the newest checkpoint, if there is one, and makes what trains on from there."""
        storage, resume = self._folder.storage, self.config.resume
        url, state = checkpoint.find_checkpoint(storage, resume, self._log.note) or ("", None)
        step = state["step"] if state else 0
        sums = self.runtime.sum_hosts([step])
        checkpoint.drop_shared()
        if sums != [step * self.runtime.num_hosts]:
            raise CheckpointError(
                f"{self.config.run_dir}: this host found step {step}, others found another; "
                "use a run folder that all hosts see, such as gs://bucket/run"
            )
        if state is not None:
            self.position = position_of(state, self.config.target_accuracy)
            check_identity(state["identity"], self.plan.identity, f"{url}: step {step}")
            if state["stream"] is not None:
                self.data.train.load_state_dict(states_from_json(state["stream"]))
        for text in doubts_about(self.config, self.data, self.plan, state):
            self._log.note(f"note: {text}")
        self.learner = Learner(self.runtime, self.config, self.data.num_classes, state)
        self._telemetry = Telemetry(self.runtime, self.plan, self._log, self.data.eval_split)
        self._started, self._seconds_before = time.perf_counter(), 0.0
        if state is not None:
            self._seconds_before = state["seconds"]
            self._telemetry.restore(state)
            self._log.note(
                f"already complete at step {step}"
                if self.is_done()
                else f"resumed at step {step} (epoch {state['epoch'] + 1})"
            )
        self._saved, self._first_step = self.position, step
        self._log.start(step)
        self._writer = None
        if self.runtime.is_master:
            # A run that is done keeps its recorded config.
            record = None if self.is_done() and url == storage.url else self.config
            self._folder.write_records(record, self.plan.order, self.data.class_names)
            # Metrics are flushed before the commit: after a kill the resumed run would leave a gap
            # in them otherwise.
            self._writer = checkpoint.CheckpointWriter(
                self._folder.storage,
                self.config.keep_checkpoints,
                self._folder.flush,
                self._log.note,
                self._run_lock,
            )
            self._exits.callback(self._writer.close)
        # Runs first at the end: writing the last checkpoint may take longer than a step.
        self._exits.callback(faulthandler.cancel_dump_traceback_later)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # First: from here on nothing is computed together, while the last checkpoint may take
        # minutes to write.
        self.runtime.heartbeat.leave(error)
        if error is not None:
            self._log.log_error(error)
        self._exits.close()

    # --- what is due ------------------------------------------------------------------------------

    def batches(self) -> Iterator[DeviceBatch]:
        """The batches from here to the end, across epochs; none if the run is done, or asked to
        stop while it waits.
        """
        if self.is_done():
            return iter(())
        feed = DeviceFeed(
            self._steps(),
            self.runtime.to_device,
            self.data.train.stop,
            self.stop_requested_while_waiting,
            num_rows=self.plan.num_rows,
            with_ids=self.config.record_losses,
        )
        self._exits.enter_context(feed)
        self._telemetry.feed = feed
        return iter(feed)

    def epoch_is_done(self) -> bool:
        """Whether the last step of an epoch has been taken and the epoch not been closed."""
        return self.position.step // self.plan.steps_per_epoch > self.position.closed_epochs

    def report_is_due(self) -> bool:
        """Whether the steps since the last report are to be logged."""
        return self._telemetry.report_is_due(self.position.step)

    def save_is_due(self) -> bool:
        """Whether a checkpoint within the epoch is due."""
        return self.plan.save_is_due(self.position.step)

    def is_done(self) -> bool:
        """Whether all epochs are closed, or `max_steps` or the target accuracy is reached, now or
        long ago.
        """
        position, limit = self.position, self.config.max_steps
        has_all_steps = position.closed_epochs >= self.config.epochs or (
            limit is not None and position.step >= limit
        )
        return has_all_steps or position.seconds_to_target is not None

    def must_stop(self) -> bool:
        """Whether any host has been asked to stop; all hosts give the same answer at the same step.

        Several hosts ask each other once in an interval only, and after the first step, which may
        compile for minutes. They take the answer after the next step, so that no device waits for
        it.
        """
        if self.runtime.num_hosts == 1:
            return self.stop_requested()
        answer, self._answer = self._answer, None
        # By the step alone, which all hosts know: when they report also depends on checkpoints and
        # epochs.
        step = self.position.step
        if step == self._first_step + 1 or self.plan.interval_is_over(step):
            self._answer = self.runtime.ask_hosts(bool(self._notice))
        return answer is not None and answer()

    def stop_requested(self) -> bool:
        """Whether any host has been asked to stop; every host must call."""
        return self.runtime.any_host(bool(self._notice))

    def stop_requested_while_evaluating(self) -> bool:
        """`stop_requested` between the steps of an evaluation, which restart the watchdog too."""
        self._restart_watchdog()
        return self.stop_requested()

    def stop_requested_while_waiting(self) -> bool:
        """Whether the only host has been asked to stop; several would have to agree, and may be in
        a step.
        """
        return self.runtime.num_hosts == 1 and bool(self._notice)

    # --- what happens -----------------------------------------------------------------------------

    def train_step(self, batch: DeviceBatch) -> None:
        """One update."""
        step = self.position.step
        assert (batch.epoch, batch.step) == divmod(step, self.plan.steps_per_epoch), (
            "steps_of yields no other"
        )
        self._telemetry.profile(step, self._folder.local / PROFILE)
        key = step_key(self.config.seed, batch.epoch, batch.step)
        weight = self.data.weight_of_step(batch.step, self.config.global_batch_size)
        self._telemetry.add(
            batch, self.learner.train_step(batch.tensors, self.plan.rate_at(step), key, weight)
        )
        self.position = replace(self.position, step=step + 1)
        self.runtime.heartbeat.set_step(step + 1)

    def report(self) -> None:
        """Logs the steps since the last report; raises NotFinite with the step and its samples.

        Leaves out the newest step, which the device computes meanwhile. Raises RunTaken if the
        folder is lost by now.
        """
        self._run_lock.check()
        self._telemetry.report(self.position.step, with_newest=False)
        self._restart_watchdog()

    def check_epoch(self) -> None:
        """Compares the samples of the finished epoch with the expected ones, and logs it; raises
        EpochMismatch.
        """
        self._report_pending()
        seen = self._telemetry.seen_by_all()
        check_epoch(
            self.position.closed_epochs, self.data.expected(self.position.closed_epochs), seen
        )
        self._telemetry.log_epoch(self.position, seen)
        if self.config.record_losses and self.runtime.is_master:
            losses = losses_file(
                self._telemetry.epoch_totals.samples, is_mixture=self.config.mix is not None
            )
            self._folder.write(losses_name(self.position.closed_epochs), losses)
        self.learner.broadcast_buffers()

    def close_epoch(self, totals: Totals | None) -> None:
        """Takes the epoch's evaluation and saves; None means that it was interrupted, and stops the
        run.
        """
        if totals is None:
            self.stop()
            return
        check_evaluation(totals, self.data.num_eval_samples)
        self._telemetry.log_evaluation(self.position, totals)
        top1 = totals.mean("top1")
        self.position = self.position.closed_with(
            top1, self._seconds(), self.config.target_accuracy
        )
        self._telemetry.start_epoch()
        self.save(top1)

    def save(self, top1: float | None = None) -> None:
        """Hands a checkpoint of this position to the writer; every host must call."""
        self._run_lock.check()
        self._report_pending()
        self.learner.broadcast_buffers()
        seen = self._telemetry.seen_by_all()
        if self._writer is not None:
            self._writer.save(self._state(seen), top1=top1)
        self._saved = self.position
        self._telemetry.pause()

    def stop(self) -> None:
        """Saves what is not saved, and raises Preempted."""
        self._save_rest()
        if self._writer is not None:
            self._writer.close()
        text = f"asked to stop: saved at step {self.position.step}; the same command resumes there"
        self._log.note(text)
        raise Preempted(text)

    def finish(self) -> None:
        """The last report, checkpoint and line."""
        self._save_rest()
        self._telemetry.log_final(self.position, self._seconds())
        self._log.note(f"next: shardset evaluate --run-dir {quote(self.config.run_dir)}")

    def _save_rest(self) -> None:
        """Ends a trace, and saves what is not saved."""
        self._telemetry.profile(None, self._folder.local / PROFILE)
        if self._saved != self.position:
            self.save()

    # --- position and checkpoints -----------------------------------------------------------------

    def _steps(self) -> Iterator[Step]:
        for epoch, step, batch in steps_of(self.data.train, self.position.step, self.plan.stop):
            yield epoch, step, batch_transforms.with_mix(self.config, batch, epoch, step)

    def _report_pending(self) -> None:
        self._telemetry.report(self.position.step, with_newest=True)
        self._restart_watchdog()

    def _state(self, seen: SampleDigest) -> CheckpointState:
        position = self.position
        epoch, step = divmod(position.step, self.plan.steps_per_epoch)
        return {
            "identity": self.plan.identity,
            "config": configs.to_dict(self.config),
            **asdict(position),
            "epoch": epoch,
            "seen": [seen.samples, seen.digest],
            "epoch_totals": self._telemetry.epoch_totals.sums,
            "outcomes": torch.from_numpy(self._telemetry.epoch_totals.samples.view(np.uint8)),
            "seconds": self._seconds(),
            "stream": order_of(self.data.train, epoch, step),
            **self.learner.state(),
        }

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    def _log_loss(self, text: str) -> None:
        """Logs which process was lost and stores the log at once, because this process may be ended
        next.
        """
        self._log.note(text)
        self._folder.flush()

    def _restart_watchdog(self) -> None:
        """Ends this process with a traceback if nothing happens for `stall_timeout_s`.

        A peer that died can leave this process in a collective for ever.
        """
        faulthandler.dump_traceback_later(
            self.config.stall_timeout_s, exit=True, file=sys.__stderr__ or sys.stderr
        )
