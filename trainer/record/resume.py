"""Finds the checkpoint that a run resumes from, and refuses to mix two runs."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from shardset.errors import ConfigError, NotFound
from shardset.order.state import OrderState, state_from_json
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from trainer.config import ORDER, TrainConfig
from trainer.record import checkpoint
from trainer.record.checkpoint_state import CheckpointState
from trainer.record.run_folder import CHECKPOINTS, folder_of, steps


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state to resume from, and the run folder or URL that holds it."""

    url: str
    state: CheckpointState


def find_checkpoint(folder: Storage, resume: str, note: Callable[[str], None]) -> ResumePoint | None:
    """The checkpoint that `config.resume` selects for a run folder; None for a fresh start.

    Raises ConfigError if this would mix two runs, or take a run back to an earlier step in its own folder.
    """
    if resume == "never" and (existing := steps(folder)):
        raise ConfigError(
            f"{folder.url} holds a run up to step {existing[-1]}; --resume never would mix two runs; take another "
            "--run-dir, or --resume auto"
        )
    newest = checkpoint.newest(folder, note)
    if resume in ("auto", "never"):
        return None if newest is None else ResumePoint(folder.url, newest[1])
    if newest is None:
        return ResumePoint(resume, checkpoint.at(open_storage(resume), note)[1])
    url = open_storage(resume).url
    step = newest[0].step
    if url.startswith(f"{folder.url}/{CHECKPOINTS}") and url != f"{folder.url}/{folder_of(step)}".rstrip("/"):
        raise ConfigError(
            f"{folder.url} holds a run up to step {step}, so it can't resume from {url}, whose steps come before; take "
            "another --run-dir"
        )
    if not f"{url}/".startswith(f"{folder.url}/"):
        note(f"{folder.url} has checkpoints of its own: it resumes from them, not from {resume}")
    return ResumePoint(folder.url, newest[1])


def in_recorded_order(config: TrainConfig) -> TrainConfig:
    """The config of a run that resumes, with the L, q and w that the run began with, where it sets none itself."""
    order = None if config.fake_data else _recorded_order(config)
    # A checkpoint of another batch size is refused by name later.
    if order is None or config.global_batch_size % (order.num_lanes * config.image.augment_repeats):
        return config
    values = {name: getattr(order, name) for name in ("num_lanes", "block_size", "window")}
    return replace(config, **{name: value for name, value in values.items() if getattr(config, name) is None})


def _recorded_order(config: TrainConfig) -> OrderState | None:
    folder = open_storage(config.run_dir)
    if steps(folder):
        with suppress(NotFound):  # of synthetic data: a run with other data is refused later
            return state_from_json(folder.read(ORDER).strip())
    if config.resume in ("auto", "never"):
        return None
    # Damage is reported when the checkpoint is loaded.
    text = checkpoint.at(open_storage(config.resume), lambda text: None)[1]["stream"]
    return None if text is None else state_from_json(text)
