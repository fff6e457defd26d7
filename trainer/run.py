"""One process' part of a run: where it stands, what it has seen, and what it writes."""

import faulthandler
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from shardset.errors import ConfigError, NotFound
from shardset.order.epoch import state_from_json
from shardset.storage.base import Storage, os_errors_as_storage_errors
from shardset.storage.open import is_address, open_storage
from shardset.stream.stream import Stream
from shardset.version import __version__
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.data.device_feed import DeviceBatch, DeviceFeed
from trainer.data.splits import Batches, Data, SampleDigest, check_epoch, open_data, steps_of
from trainer.errors import CheckpointError, NotFinite, PlanMismatch, Preempted
from trainer.model import augment, schedule
from trainer.model.learner import Learner, step_key
from trainer.record import checkpoint
from trainer.record.metrics import (
    METRICS,
    EpochRecord,
    EvalRecord,
    FinalRecord,
    Rates,
    RunLog,
    StepRecord,
    Totals,
    advice,
    log_name,
)
from trainer.record.run_folder import RunFolder
from trainer.runtime.runtime import Runtime
from trainer.settings import values_of
from trainer.supervise.preemption import METADATA, Notice
from trainer.supervise.run_lock import RunLock, acquire_run_lock

PROFILE = "profile"


def check_batch(config: TrainConfig, runtime: Runtime) -> None:
    """Raises ConfigError unless every device gets the same whole number of samples in every pass."""
    each = runtime.batch_divisor * config.accumulate
    if config.global_batch_size % each:
        lower = config.global_batch_size // each * each
        raise ConfigError(
            f"global_batch_size {config.global_batch_size} does not divide over {runtime.num_devices} devices"
            + (f" in {config.accumulate} passes" if config.accumulate > 1 else "")
            + f"; use {' or '.join(str(size) for size in (lower, lower + each) if size)}"
        )


class Run:
    """One process' part of a run: its position, what it saw since the last report, and where things are written."""

    def __init__(self, runtime: Runtime, config: TrainConfig) -> None:
        check_batch(config, runtime)
        self.runtime, self.config = runtime, config
        self.data = open_data(config, runtime.host, runtime.num_hosts)
        self.seen = SampleDigest()
        self.epoch_totals = Totals()
        self.rates = Rates()
        self.run_rates = Rates()
        self.replica_samples = 0
        self._pending: list[tuple[DeviceBatch, torch.Tensor]] = []
        self._reported = False
        self._tracing = False
        self._feed: DeviceFeed | None = None
        self._exits = ExitStack()
        try:
            self._open()
        except BaseException as error:
            self.runtime.watch.leave(error)
            self._exits.close()
            raise

    def _open(self) -> None:
        self._watch()
        self._exits.callback(faulthandler.cancel_dump_traceback_later)
        self.notice = self._exits.enter_context(Notice(METADATA if self.runtime.is_cloud else None))
        self.hold = self._take_folder()
        own_log = log_name(self.runtime.host)
        self.folder = RunFolder(self.config.run_dir, (own_log, METRICS) if self.runtime.is_master else (own_log,))
        self._exits.callback(self.folder.close)
        self.log = RunLog(self.folder.local, self.runtime.host, master=self.runtime.is_master)
        self._exits.callback(self.log.close)
        if self.runtime.is_master:
            checkpoint.sweep(self.folder.storage)
        self.runtime.watch.on_loss(self._note_now)
        self._log_config()
        self.steps_per_epoch = len(self.data.train)
        self.rate_at = schedule.of(self.config, self.steps_per_epoch)
        self.identity = identity_of(self.config, self.data)
        saved = self._resumed()
        self.learner = Learner(self.runtime, self.config, self.data.num_classes, saved)
        self._restore(saved)
        self._write_config()
        self._write_order()
        self._mix = augment.mix_of(self.config)
        self.writer = self._open_writer()
        # Not while the last checkpoint is being written, which may take longer than a step.
        self._exits.callback(faulthandler.cancel_dump_traceback_later)

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First: from here on nothing is computed together, while the last checkpoint may take minutes to write.
        self.runtime.watch.leave(error)
        if error is not None:
            self.log.ended(error)
        self._exits.__exit__(kind, error, trace)

    # --- where the run stands ----------------------------------------------------------------------------------------

    def batches(self) -> Iterator[DeviceBatch]:
        """The batches from here to the end, across epochs; none if the run is done, or asked to stop while it waits."""
        if self.is_done():
            return iter(())
        feed = DeviceFeed(self._positions(), self.runtime.put, self.data.train.stop, self.was_asked_alone)
        self._exits.enter_context(feed)
        self._feed = feed
        return iter(feed)

    def epoch_is_done(self) -> bool:
        """Whether the last step of an epoch has been taken and the epoch not been closed."""
        return self.done // self.steps_per_epoch > self.closed

    def report_is_due(self) -> bool:
        """Once in an interval, and after the first step, so that compiling is in no rate."""
        return self.done % self.config.log_every_steps == 0 or not self._reported

    def save_is_due(self) -> bool:
        """At every so many steps, if the run says so."""
        every = self.config.checkpoint_every_steps
        return every is not None and self.done % every == 0

    def must_stop(self) -> bool:
        """Whether any host has been asked to stop; all hosts give the same answer at the same step.

        They look at every report: also after the first step, which may have compiled for minutes.
        """
        return (self.runtime.num_hosts == 1 or not self._pending) and self.was_asked()

    def was_asked(self) -> bool:
        """Whether any host has been asked to stop; every host must call."""
        return self.runtime.any_host(bool(self.notice))

    def was_asked_meanwhile(self) -> bool:
        """`was_asked` between the steps of an evaluation, which count as steps of a run that is alive."""
        self._watch()
        return self.was_asked()

    def was_asked_alone(self) -> bool:
        """Whether the only host has been asked to stop: several would have to agree, and may be in a step."""
        return self.runtime.num_hosts == 1 and bool(self.notice)

    def is_done(self) -> bool:
        """Whether all epochs are closed, `max_steps` is reached or the target accuracy is; maybe long ago."""
        limit = self.config.max_steps
        enough = self.closed >= self.config.epochs or (limit is not None and self.done >= limit)
        return enough or self.seconds_to_target is not None

    # --- what happens ------------------------------------------------------------------------------------------------

    def learn(self, fed: DeviceBatch) -> None:
        """One update."""
        if (fed.epoch, fed.step) != divmod(self.done, self.steps_per_epoch):
            raise PlanMismatch(f"got epoch {fed.epoch} step {fed.step} where step {self.done} of the run was due")
        self._profile()
        row = self.learner.train_step(
            fed.tensors, self.rate_at(self.done), step_key(self.config.seed, fed.epoch, fed.step)
        )
        # Without its tensors: they would stay on the device until the next report.
        self._pending.append((replace(fed, tensors={}), row))
        self.done += 1
        self.runtime.watch.reached(self.done)
        self.seen = self.seen.plus(fed.ids[fed.weights > 0])

    def report(self) -> None:
        """Looks at the losses since the last report; raises NotFinite with the step and its samples."""
        rows = self.runtime.fetch([row for _, row in self._pending])
        self._check_finite(rows)
        self._watch()
        samples = sum(int((fed.weights > 0).sum()) for fed, _ in self._pending)
        self.rates.add(samples)
        self.run_rates.add(samples)
        self.replica_samples += samples
        interval = Totals().plus(rows)
        self.epoch_totals = self.epoch_totals.plus(rows)
        self._pending.clear()
        self._reported = True
        self._log_step(interval)

    def check_epoch(self) -> None:
        """Compares the samples of the finished epoch with the plan, and logs it; raises PlanMismatch."""
        if self._pending:
            self.report()
        seen = self._seen_by_all()
        check_epoch(self.closed, self.data.plan, seen)
        self._log_epoch(seen)
        self.learner.share_buffers()
        self._evaluating_since = time.perf_counter()

    def close_epoch(self, totals: Totals | None) -> None:
        """Takes the epoch's evaluation and saves; None means that it was interrupted, and the run stops here."""
        if totals is None:
            self.stop()
            return
        self._log_evaluation(totals)
        self._remember(totals.mean("top1"))
        self.closed += 1
        self._start_counting()
        self.save(totals.mean("top1"))

    def save(self, top1: float | None = None) -> None:
        """Hands a checkpoint of this position to the writer; every host must call."""
        if self._pending:
            self.report()
        self.learner.share_buffers()
        seen = self._seen_by_all()
        state = self._state(seen)
        if self.writer is not None and self.hold is not None:
            self.hold.check()
            self.writer.save(state, top1=top1)
        self._saved = (self.done, self.closed)
        self.rates.mark()
        self.run_rates.mark()

    def stop(self) -> None:
        """Saves what is not saved, and raises Preempted."""
        self._profile(ended=True)
        if self._saved != (self.done, self.closed):
            self.save()
        if self.writer is not None:
            self.writer.close()
        text = f"asked to stop: saved at step {self.done}; the same command goes on from there"
        self.log.note(text)
        raise Preempted(text)

    def finish(self) -> None:
        """The last report, checkpoint and line."""
        self._profile(ended=True)
        if self._pending:
            self.report()
        if self._saved != (self.done, self.closed):
            self.save()
        self.log.record(self._final())
        self.log.note(self._last_words())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _positions(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """The steps to take, with their batches; none past the end of the run."""
        stop = min(self.config.max_steps or self._num_steps, self._num_steps)
        for epoch, step, batch in steps_of(self.data.train, self.done, stop):
            yield epoch, step, self._mix(batch, epoch, step)

    @property
    def _num_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    def _resumed(self) -> dict[str, Any] | None:
        found, where = self._found()
        step = found[0].step if found else 0
        if self.runtime.sum_hosts([step]) != [step * self.runtime.num_hosts]:
            raise CheckpointError(
                f"{self.config.run_dir}: this host found step {step}, others found another; "
                "use a run folder that all hosts see, such as gs://bucket/run"
            )
        if found is None:
            return None
        checkpoint.check_identity(found[1]["identity"], self.identity, f"{where}: step {step}")
        check_stream(self.data.train, found[1]["stream"])
        self.log.note(f"resumed at step {step} (epoch {found[0].epoch})")
        return found[1]

    def _found(self) -> tuple[tuple[checkpoint.CommitMark, dict[str, Any]] | None, str]:
        """The checkpoint to go on from, if any, and the place that it was looked for in."""
        resume, own = self.config.resume, self.folder.storage
        if resume == "never":
            refuse_checkpoints(own)
        found = checkpoint.newest(own, self.log.note)
        if resume in ("auto", "never"):
            return found, own.url
        if found is None:
            return checkpoint.at(open_storage(resume), self.log.note), resume
        url = open_storage(resume).url
        refuse_going_back(own, found[0].step, url)
        if not f"{url}/".startswith(f"{own.url}/"):
            self.log.note(f"{own.url} has checkpoints of its own: it goes on from them, not from {resume}")
        return found, own.url

    def _restore(self, saved: dict[str, Any] | None) -> None:
        position = saved or {}
        self.done: int = position.get("step", 0)
        self.closed: int = position.get("closed_epochs", 0)
        self.best: float | None = position.get("best_top1")
        self.best_epoch: int | None = position.get("best_epoch")
        self.last_top1: float | None = position.get("last_top1")
        self.seconds_to_target: float | None = None
        if self._meets_target(self.last_top1):  # by now it may be another one, or none
            self.seconds_to_target = position.get("seconds_to_target") or position.get("seconds", 0.0)
        self._saved = (self.done, self.closed)
        self._seconds_before: float = position.get("seconds", 0.0)
        self._started = time.perf_counter()
        self._start_counting()
        # What all hosts saw of this epoch before is counted once, by the first.
        if saved and self.runtime.is_master:
            self.seen = SampleDigest(*saved["seen"])
        # Of all hosts already. An older checkpoint has none: its epoch's record is of what comes after it.
        self.epoch_totals = Totals(*position.get("epoch_totals", ()))

    def _start_counting(self) -> None:
        self.seen = SampleDigest()
        self.epoch_totals = Totals()
        self.rates = Rates()
        self.replica_samples = 0
        self._epoch_started = time.perf_counter()
        self._waited_before = self._feed.wait_s if self._feed else 0.0
        self._busy_before = self.runtime.busy_s

    def _seen_by_all(self) -> SampleDigest:
        samples, digest = self.runtime.sum_hosts([self.seen.samples, self.seen.digest])
        return SampleDigest().joined(SampleDigest(samples, digest))

    def _state(self, seen: SampleDigest) -> dict[str, Any]:
        epoch, step = divmod(self.done, self.steps_per_epoch)
        return {
            "format": checkpoint.FORMAT,
            "version": __version__,
            "identity": self.identity,
            "config": configs.to_dict(self.config),
            "step": self.done,
            "epoch": epoch,
            "step_in_epoch": step,
            "closed_epochs": self.closed,
            "seen": [seen.samples, seen.digest],
            "epoch_totals": list(astuple(self.epoch_totals)),
            "best_top1": self.best,
            "best_epoch": self.best_epoch,
            "last_top1": self.last_top1,
            "seconds": self._seconds(),
            "seconds_to_target": self.seconds_to_target,
            "stream": stream_state(self.data.train, epoch, step),
            **self.learner.state(),
        }

    def _log_evaluation(self, totals: Totals) -> None:
        check_evaluation(totals, self.data.num_eval_samples)
        record = EvalRecord(
            epoch=self.closed,
            global_step=self.done,
            samples=int(totals.weight),
            loss=totals.mean("loss"),
            top1=totals.mean("top1"),
            top5=totals.mean("top5"),
            seconds=time.perf_counter() - self._evaluating_since,
        )
        self.log.record(record)

    def _remember(self, top1: float) -> None:
        self.last_top1 = top1
        if self.best is None or top1 > self.best:
            self.best, self.best_epoch = top1, self.closed
        if self._meets_target(top1):
            self.seconds_to_target = self._seconds()

    def _meets_target(self, top1: float | None) -> bool:
        target = self.config.target_accuracy
        return target is not None and top1 is not None and top1 >= target

    def _check_finite(self, rows: torch.Tensor) -> None:
        bad = np.flatnonzero(~np.isfinite(rows[:, 0].numpy()))
        if bad.size:
            fed = self._pending[int(bad[0])][0]
            raise NotFinite(
                f"the loss is {rows[int(bad[0]), 0].item()} in epoch {fed.epoch} step {fed.step}; "
                f"this host's samples were {fed.ids.tolist()}; "
                "nothing was saved since: lower the learning rate, or look at these samples"
            )

    def _watch(self) -> None:
        # A peer that died can leave this process in a collective for ever: no step in this time ends it with a trace.
        faulthandler.dump_traceback_later(self.config.stall_timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)

    def _note_now(self, text: str) -> None:
        """Logs what may be the last sentence of this process."""
        self.log.note(text)
        self.folder.flush()

    def _profile(self, *, ended: bool = False) -> None:
        if self.config.profile_steps is None:
            return
        start, stop = self.config.profile_steps
        wanted = start <= self.done < stop and not ended
        if wanted != self._tracing:
            (self.runtime.start_trace if wanted else self.runtime.stop_trace)(self.folder.local / PROFILE)
            self._tracing = wanted

    def _log_step(self, interval: Totals) -> None:
        epoch, step = divmod(self.done - 1, self.steps_per_epoch)
        record = StepRecord(
            device=str(self.runtime.device),
            epoch=epoch,
            step=step,
            global_step=self.done - 1,
            loss=interval.mean("loss"),
            top1=interval.mean("top1"),
            rate=self.rates.rate,
            global_rate=self.rates.global_rate,
            learning_rate=self.rate_at(self.done - 1),
        )
        self.log.record(record)
        self.log.progress(
            f"epoch {epoch + 1}/{self.config.epochs} step {step + 1}/{self.steps_per_epoch} "
            f"loss {record.loss:.4f} {record.rate:.0f} samples/s"
        )

    def _log_epoch(self, seen: SampleDigest) -> None:
        seconds = max(1e-9, time.perf_counter() - self._epoch_started)
        waited = 100 * ((self._feed.wait_s if self._feed else 0.0) - self._waited_before) / seconds
        self.log.record(
            EpochRecord(
                device=str(self.runtime.device),
                epoch=self.closed,
                global_step=self.done,
                samples=seen.samples,
                replica_samples=self.replica_samples,
                key_digest=seen.text,
                loss=self.epoch_totals.mean("loss"),
                top1=self.epoch_totals.mean("top1"),
                reduced_global_rate=self._reduced(self.rates),
                input_wait_percent=waited,
                busy_percent=min(100.0, 100 * (self.runtime.busy_s - self._busy_before) / seconds),
                compilations=self.runtime.compilations,
            )
        )
        if (text := advice(waited)) is not None:
            self.log.note(text)

    def _reduced(self, rates: Rates) -> float:
        return self.runtime.sum_hosts([round(1000 * rates.global_rate)])[0] / 1000

    def _final(self) -> FinalRecord:
        return FinalRecord(
            accuracy=self.last_top1,
            best_accuracy=self.best,
            best_epoch=self.best_epoch,
            epochs=self.closed,
            global_step=self.done,
            reduced_global_rate=self._reduced(self.run_rates),
            seconds=self._seconds(),
            seconds_to_target=self.seconds_to_target,
        )

    def _last_words(self) -> str:
        trained = f"after {self.done} steps ({self.closed} epochs) in {self._seconds():.0f} s"
        if self.last_top1 is None:
            return f"done {trained}; no epoch was completed, so nothing was evaluated"
        return f"test accuracy {self.last_top1:.4f} (best {self.best:.4f} in epoch {self.best_epoch}) {trained}"

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    def _take_folder(self) -> RunLock | None:
        """The run folder for the first host; every host must call. Raises ConfigError on all hosts or on none."""
        taken, refused = None, ""
        if self.runtime.is_master:
            try:
                taken = acquire_run_lock(self.config.run_dir, lambda text: print(text, file=sys.stderr, flush=True))
                self._exits.callback(taken.close)
            except ConfigError as error:
                refused = str(error)
        facts = facts_of(self.config, self.data, self.runtime.num_hosts) | {"refused": refused}
        found = [json.loads(text) for text in self.runtime.gather(json.dumps(facts))]
        if found[0]["refused"]:
            raise ConfigError(found[0]["refused"])
        check_agreement(found)
        return taken

    def _open_writer(self) -> checkpoint.CheckpointWriter | None:
        if not self.runtime.is_master:
            return None
        # What a run has logged must stand where its checkpoint does: a kill would leave a hole in the records.
        writer = checkpoint.CheckpointWriter(
            self.folder.storage, self.config.keep_checkpoints, before_commit=self.folder.flush, tell=self.log.note
        )
        self._exits.callback(writer.close)
        return writer

    def _log_config(self) -> None:
        """What was asked for, also if it is refused."""
        self.log.note(
            f"trainer {__version__}, strategy {self.runtime.strategy}, {self.runtime.num_devices} devices: "
            + configs.to_json(self.config)
        )

    def _write_config(self) -> None:
        """What the run does: not what was refused, nor what found a run with nothing left to do."""
        if self.runtime.is_master and not (self.is_done() and self._has_config()):
            self._write(configs.RECORD, configs.to_json(from_anywhere(self.config)) + "\n")

    def _has_config(self) -> bool:
        try:
            self.folder.storage.stat(configs.RECORD)
        except NotFound:
            return False
        return True

    def _write_order(self) -> None:
        """The order of the training stream, for `python -m trainer explain`."""
        state = stream_state(self.data.train, 0, 0)
        if self.runtime.is_master and state is not None:
            self._write(configs.ORDER, state + "\n")

    def _write(self, name: str, text: str) -> None:
        path = self.folder.local / name
        with os_errors_as_storage_errors(str(path)):
            path.write_text(text)


def identity_of(config: TrainConfig, data: Data) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that goes on from it."""
    return {
        "manifest digest": data.manifest_digest,
        "train_split": config.train_split,
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        **model_of(config, data),
        "optimizer": config.optimizer.name,
    }


def model_of(config: TrainConfig, data: Data) -> dict[str, Any]:
    """What a checkpoint must have in common with who evaluates it."""
    model = config.model
    return {"model": f"{model.name} stem={model.stem} norm={model.norm} classes={data.num_classes}"}


def facts_of(config: TrainConfig, data: Data, num_hosts: int) -> dict[str, Any]:
    """What all hosts of a run must have in common, by name; each may have its own copy of the shard set."""
    settings = {key: value for key, value in values_of(config).items() if key != "manifest"}
    return {"manifest digest": data.manifest_digest, "hosts": num_hosts, **settings}


def check_agreement(facts: Sequence[dict[str, Any]]) -> None:
    """Raises ConfigError, naming both hosts and each difference, unless all hosts have the facts of host 0."""
    first = facts[0]
    for host, own in enumerate(facts):
        names = [name for name in first if name != "refused" and own[name] != first[name]]
        if names:
            differences = "; ".join(
                f"{name} is {first[name]!r} on host 0 and {own[name]!r} on host {host}" for name in names
            )
            raise ConfigError(f"the hosts of this run differ: {differences}; start all with the same command")


def stream_state(stream: Batches, epoch: int, step: int) -> str | None:
    """The stream's own state at a position, as text; None for fake data."""
    return stream.state(epoch, step).to_json() if isinstance(stream, Stream) else None


def from_anywhere(config: TrainConfig) -> TrainConfig:
    """The same with local places as absolute paths: who reads the record may work in another folder."""
    return replace(config, manifest=_absolute(config.manifest), cache_dir=_absolute(config.cache_dir))


def _absolute(url: str | None) -> str | None:
    return url if url is None or is_address(url) else os.path.abspath(url)


def check_stream(stream: Batches, state: str | None) -> None:
    """Raises ConfigError, naming what differs, unless the stream goes on in the order that a state says."""
    if isinstance(stream, Stream) and state is not None:
        stream.resume(state_from_json(state))


def refuse_checkpoints(folder: Storage) -> None:
    """Raises ConfigError if a run folder has checkpoints."""
    steps = checkpoint.steps(folder)
    if steps:
        raise ConfigError(
            f"{folder.url} holds a run up to step {steps[-1]}; --resume never would mix two runs; take another "
            "--run-dir, or --resume auto"
        )


def refuse_going_back(folder: Storage, step: int, url: str) -> None:
    """Raises ConfigError if `url` is a checkpoint of the run folder, and not that of its newest step."""
    checkpoints = f"{folder.url}/{checkpoint.FOLDER}"
    if url.startswith(checkpoints) and url != f"{folder.url}/{checkpoint.folder_of(step)}".rstrip("/"):
        raise ConfigError(
            f"{folder.url} holds a run up to step {step}, so it can't go on from {url}, whose steps come before; take "
            "another --run-dir"
        )


def check_evaluation(totals: Totals, expected: int) -> None:
    """Raises PlanMismatch unless every sample was evaluated, NotFinite if their loss is no number."""
    if int(totals.weight) != expected:
        raise PlanMismatch(f"evaluated {int(totals.weight)} samples, the split has {expected}")
    if not math.isfinite(totals.loss):
        raise NotFinite(
            f"the loss of the evaluation is {totals.loss}, so its accuracy means nothing: lower the learning "
            "rate, or clip gradients with --set regularize.clip_norm=1; a run goes on from the checkpoint before it"
        )
