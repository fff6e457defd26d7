"""The numbers of a run as TensorBoard events, and those sent to Weights & Biases by its own client.

That client reads its own environment variables: WANDB_MODE=offline, WANDB_PROJECT and so on.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from shardset.errors import ConfigError, missing_library
from trainer.config import TrainConfig, absolute, to_dict

EVENTS = "tensorboard"
FLUSH_S = 5
"""Longest time between two flushes of events.

A writer thread whose wake-up a Ctrl-C swallowed sleeps as long.
"""


def open_events(folder: Path, step: int) -> Any:
    """The writer of TensorBoard's event files in the run folder. Raises OSError, as it does.

    TensorBoard forgets what a killed run wrote after that step.
    """
    # Imported late: it takes a second, and only one process of a run needs it. It writes on its own
    # thread.
    from torch.utils import tensorboard

    writer: Any = tensorboard.SummaryWriter  # it is not typed
    return writer(str(folder / EVENTS), flush_secs=FLUSH_S, purge_step=step + 1)


def start_wandb(config: TrainConfig, folder: Path) -> Any:
    """A run of W&B that takes the events opened after it. All runs in a run folder are one there.

    Raises ConfigError.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ConfigError(f"--wandb: {missing_library(error, 'wandb')}") from error
    client: Any = wandb  # checks none of its types
    try:
        return client.init(
            project=os.environ.get("WANDB_PROJECT", "shardset"),
            id=run_id(config),
            name=config.run_dir,
            resume="allow",
            dir=str(folder),
            config=to_dict(config),
            sync_tensorboard=True,
            settings=client.Settings(console="off", silent=True),
        )
    except client.errors.Error as error:
        advice = "log in with `wandb login`, or set WANDB_MODE=offline"
        raise ConfigError(f"--wandb: {error}; {advice}") from error


def run_id(config: TrainConfig) -> str:
    """The same for all runs in a run folder."""
    return hashlib.sha256(absolute(config.run_dir).encode()).hexdigest()[:16]
