"""The output of one process to the run folder: its log, and on the first host everything that a run writes once."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from shardset.program import count
from shardset.storage.open import open_storage
from shardset.version import __version__
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.record.checkpoint import CheckpointWriter
from trainer.record.checkpoint_names import FOLDER, steps
from trainer.record.log_files import METRICS, log_name
from trainer.record.loggers import open_logger
from trainer.record.metrics import RunLog
from trainer.record.run_folder import RunFolder
from trainer.runtime.base import Runtime
from trainer.supervise.run_lock import RunLock


class RunOutput:
    """The run folder and the log of this process, open until the exits run. Construct it while holding the run lock."""

    def __init__(self, runtime: Runtime, config: TrainConfig, lock: RunLock, exits: ExitStack) -> None:
        self._runtime, self._config, self._exits, self._is_master = runtime, config, exits, runtime.is_master
        self._lock = lock
        appended = [log_name(runtime.host), *([METRICS] if self._is_master else [])]
        self.folder = RunFolder(config.run_dir, appended, lock)
        exits.callback(self.folder.close)
        logger = open_logger(config, self.folder.local) if self._is_master else None
        self.log = RunLog(
            self.folder.local, runtime.host, master=self._is_master, show_records=config.show_steps, logger=logger
        )
        exits.callback(self.log.close)
        if self._is_master:
            # What a killed run left of a file that it was writing.
            open_storage(f"{self.folder.storage.url}/{FOLDER}").sweep()
        runtime.heartbeat.on_loss(self._log_loss)
        # Logged first, so that the log of a run that is refused later shows its config too.
        started = f"trainer {__version__}, strategy {runtime.strategy}, {count(runtime.num_devices, 'device')}"
        self.log.note(started, f": {configs.to_json(config)}")

    def write_records(self, order: str | None, classes: Sequence[str], *, is_done: bool) -> None:
        """Writes config, order and classes of a run that was accepted. A run that is done keeps its recorded config."""
        if not self._is_master:
            return
        if not (is_done and steps(self.folder.storage)):
            self.folder.write(configs.RECORD, configs.to_json(from_anywhere(self._config)) + "\n")
        if order is not None:
            self.folder.write(configs.ORDER, order + "\n")
        if classes:
            self.folder.write(configs.CLASSES, json.dumps(classes) + "\n")

    def open_writer(self) -> CheckpointWriter | None:
        """The writer of the run's checkpoints; None on all hosts but the first."""
        if not self._is_master:
            return None
        # Metrics are flushed before the commit: after a kill the resumed run would leave a gap in them otherwise.
        writer = CheckpointWriter(
            self.folder.storage, self._config.keep_checkpoints, self.folder.flush, self.log.note, self._lock
        )
        self._exits.callback(writer.close)
        return writer

    def _log_loss(self, text: str) -> None:
        """Logs which process was lost and stores the log at once, because this process may be ended next."""
        self.log.note(text)
        self.folder.flush()


def from_anywhere(config: TrainConfig) -> TrainConfig:
    """The config with absolute local paths, so that it can be read from any folder."""
    return replace(
        config,
        manifest=_absolute(config.manifest),
        cache_dir=_absolute(config.cache_dir),
        compile_cache=_absolute(config.compile_cache),
    )


def _absolute(url: str | None) -> str | None:
    return url if url is None or "://" in url else os.path.abspath(url)
