"""The lines of MLPerf's log: what its compliance checker reads of a run, `:::MLLOG {...}`.

Format and keys are those of github.com/mlcommons/logging (mlperf_logging/mllog/mllog.py and constants.py).
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import TrainConfig

NAME = "mlperf.log"
"""The file of the run folder that holds the lines."""


class MlperfLines:
    """Turns the course of a run into lines. Epochs are counted from 1; times are those of `clock`, in seconds."""

    def __init__(self, config: TrainConfig, clock: Callable[[], float] = time.time) -> None:
        self._config, self._clock = config, clock
        self._opened_ms = self._epoch_began_ms = self._now_ms()
        self._is_running = self._in_epoch = False

    def begin(self, train_samples: int, eval_samples: int) -> list[str]:
        """The lines before the first batch is read; an epoch has `train_samples`, with repeats."""
        config, self._is_running = self._config, True
        facts = {
            "seed": config.seed,
            "global_batch_size": config.global_batch_size,
            "gradient_accumulation_steps": config.accumulate,
            "train_samples": train_samples,
            "eval_samples": eval_samples,
            "opt_name": config.optimizer.name,
            "opt_base_learning_rate": config.optimizer.learning_rate,
            "opt_learning_rate_warmup_epochs": config.schedule.warmup_epochs,
            "opt_weight_decay": config.optimizer.weight_decay,
        }
        lines = [_line("INTERVAL_START", "init_start", self._opened_ms)]
        self._epoch_began_ms = now = self._now_ms()
        lines += [_line("POINT_IN_TIME", key, now, value) for key, value in facts.items()]
        return [*lines, _line("INTERVAL_END", "init_stop", now), _line("INTERVAL_START", "run_start", now)]

    def record(self, kind: str, values: Mapping[str, Any]) -> list[str]:
        """The lines that a record of the run brings."""
        now = self._now_ms()
        if kind == "final":
            is_missed = self._config.target_accuracy is not None and values["seconds_to_target"] is None
            return self.end("aborted" if is_missed else "success")
        epoch = {"epoch_num": values["epoch"] + 1}
        match kind:
            case "step" if not self._in_epoch:
                self._in_epoch = True
                return [_line("INTERVAL_START", "epoch_start", self._epoch_began_ms, metadata=epoch)]
            case "epoch":
                self._in_epoch = False
                return [
                    _line("INTERVAL_END", "epoch_stop", now, metadata=epoch),
                    _line("INTERVAL_START", "eval_start", now, metadata=epoch),
                ]
            case "eval":
                self._epoch_began_ms = now
                return [
                    _line("POINT_IN_TIME", "eval_accuracy", now, values["top1"], epoch),
                    _line("INTERVAL_END", "eval_stop", now, metadata=epoch),
                ]
        return []

    def end(self, status: str = "aborted") -> list[str]:
        """The line of the run's end; none before it began and after it ended."""
        if not self._is_running:
            return []
        self._is_running = False
        return [_line("INTERVAL_END", "run_stop", self._now_ms(), metadata={"status": status})]

    def _now_ms(self) -> int:
        return int(1000 * self._clock())


def _line(event: str, key: str, time_ms: int, value: object = None, metadata: Mapping[str, object] = {}) -> str:
    values = {"namespace": "", "time_ms": time_ms, "event_type": event, "key": key, "value": value}
    return f":::MLLOG {json.dumps({**values, 'metadata': metadata})}"
