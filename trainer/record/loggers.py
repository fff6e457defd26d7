"""The numbers of a run sent to TensorBoard and other loggers, through their own clients.

The clients read their own environment variables: WANDB_MODE=offline, WANDB_PROJECT, MLFLOW_TRACKING_URI and so on.
A resumed run sends to the run that it began there: it is found by the run folder.
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
"""Longest time between two flushes of events. A writer thread whose wake-up a Ctrl-C swallowed sleeps as long."""

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
        # Imported late: it takes a second, and only one process of a run needs it. It writes on its own thread.
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

        library: Any = mlflow
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(folder / DATABASE).absolute()}")
        try:
            self._client = library.MlflowClient(tracking_uri=uri)
            self._run = self._earlier_or_new(config)
        except library.exceptions.MlflowException as error:
            advice = "set MLFLOW_TRACKING_URI to a server or sqlite:///FILE"
            raise ConfigError(f"--logger mlflow: {error}; {advice}") from error

    def _earlier_or_new(self, config: TrainConfig) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        earlier = self._client.search_runs([number], f"tags.{RUN_TAG} = '{run_id(config)}'", max_results=1)
        if earlier:
            self._client.update_run(earlier[0].info.run_id, status="RUNNING")
            return str(earlier[0].info.run_id)
        run = self._client.create_run(number, run_name=config.run_dir, tags={RUN_TAG: run_id(config)})
        for key, value in values_of(config).items():
            self._client.log_param(run.info.run_id, key, value_text(value))
        return str(run.info.run_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step, synchronous=False)

    def close(self) -> None:
        self._client.set_terminated(self._run)


LOGGERS: dict[str, type[WandbLogger | MlflowLogger]] = {"wandb": WandbLogger, "mlflow": MlflowLogger}


def open_logger(config: TrainConfig, folder: Path) -> Logger | None:
    """The logger that the config names, if any. Raises ConfigError where it can't be opened."""
    try:
        return config.logger and LOGGERS[config.logger](config, folder)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--logger {config.logger}: {missing_library(error, str(config.logger))}") from error


def run_id(config: TrainConfig) -> str:
    """The same for all runs in a run folder."""
    url = config.run_dir if "://" in config.run_dir else os.path.abspath(config.run_dir)
    return hashlib.sha256(url.encode()).hexdigest()[:16]
