"""The numbers of a run sent to TensorBoard and other loggers, through their own clients.

The clients read their own environment variables: WANDB_MODE=offline, WANDB_PROJECT,
MLFLOW_TRACKING_URI and so on. A resumed run sends to the run that it began there: it is found by
the run folder.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shardset.errors import ConfigError, missing_library
from shardset.settings import value_text, values_of
from shardset.storage.base import os_errors_as_storage_errors
from trainer.config import TrainConfig, to_dict

EVENTS = "tensorboard"
FLUSH_S = 5
"""Longest time between two flushes of events.

A writer thread whose wake-up a Ctrl-C swallowed sleeps as long.
"""

PROJECT = "shardset"
DATABASE = "mlflow.db"
RUN_TAG = "shardset_run"


class Logger(Protocol):
    """Takes the numbers of a step by name; `close` sends what is left."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoardLogger:
    """TensorBoard: event files in the run folder. Raises StorageError if they can't be written."""

    def __init__(self, folder: Path) -> None:
        # Imported late: it takes a second, and only one process of a run needs it. It writes on its
        # own thread.
        from torch.utils import tensorboard

        writer: Any = tensorboard.SummaryWriter  # it is not typed
        self._at = str(folder / EVENTS)
        self.events = writer(self._at, flush_secs=FLUSH_S)

    def log(self, values: Mapping[str, float], step: int) -> None:
        with os_errors_as_storage_errors(self._at):
            for name, value in values.items():
                self.events.add_scalar(name, value, step)

    def close(self) -> None:
        with os_errors_as_storage_errors(self._at):
            self.events.close()


class WandbLogger:
    """Weights & Biases."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        import wandb

        client: Any = wandb  # checks none of its types
        try:
            self._run = client.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=run_id(config),
                name=config.run_dir,
                resume="allow",
                dir=str(folder),
                config=to_dict(config),
                settings=client.Settings(console="off", silent=True),
            )
        except client.errors.Error as error:
            advice = "log in with `wandb login`, or set WANDB_MODE=offline"
            raise ConfigError(f"--logger wandb: {error}; {advice}") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """MLflow: the server of MLFLOW_TRACKING_URI, else a database in the run folder."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        tag = {RUN_TAG: run_id(config)}
        if self._mlflow.active_run():
            raise ConfigError(
                "--logger mlflow: a run is active in this process; end it with mlflow.end_run()"
                " first"
            )
        try:
            self._mlflow.set_tracking_uri(
                os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.absolute()}/{DATABASE}")
            )
            self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
            query = f"tags.{RUN_TAG} = '{tag[RUN_TAG]}'"
            earlier = self._mlflow.search_runs(
                filter_string=query, max_results=1, output_format="list"
            )
            self._mlflow.start_run(
                earlier[0].info.run_id if earlier else None, run_name=config.run_dir, tags=tag
            )
            if not earlier:
                self._mlflow.log_params(
                    {key: value_text(value) for key, value in values_of(config).items()}
                )
        except mlflow.exceptions.MlflowException as error:
            advice = "set MLFLOW_TRACKING_URI to a server or sqlite:///FILE"
            raise ConfigError(f"--logger mlflow: {error}; {advice}") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step, synchronous=False)

    def close(self) -> None:
        self._mlflow.end_run()


LOGGERS: dict[str, type[WandbLogger | MlflowLogger]] = {
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def open_logger(config: TrainConfig, folder: Path) -> Logger | None:
    """The logger that the config names, if any. Raises ConfigError where it can't be opened."""
    try:
        return config.logger and LOGGERS[config.logger](config, folder)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--logger {config.logger}: {missing_library(error, str(config.logger))}"
        ) from error


def run_id(config: TrainConfig) -> str:
    """The same for all runs in a run folder."""
    url = config.run_dir if "://" in config.run_dir else os.path.abspath(config.run_dir)
    return hashlib.sha256(url.encode()).hexdigest()[:16]
