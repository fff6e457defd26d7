"""Names of the files and folders of checkpoints. Importing this needs no torch."""

import re
from typing import Final

from shardset.storage.base import Storage

FOLDER = "checkpoints/"
STATE: Final = "state.pt"
STATE_AGAIN: Final = "state-again.pt"
COMMIT = "commit.json"

_IN_CHECKPOINT = re.compile(r"checkpoints/step-(\d{9}|[1-9]\d{9,})/")


def folder_of(step: int) -> str:
    """`checkpoints/step-000000123/`."""
    return f"{FOLDER}step-{step:09d}/"


def step_of(name: str) -> int | None:
    """The step of the checkpoint that a file belongs to; None if it does not lie in a checkpoint folder."""
    match = _IN_CHECKPOINT.match(name)
    return int(match[1]) if match else None


def steps(storage: Storage) -> list[int]:
    """The steps of the checkpoints in a run folder that have a commit mark, damaged or not; oldest first."""
    names = [stat.name for stat in storage.list(FOLDER)]
    return sorted(step for name in names if (step := step_of(name)) is not None and name == folder_of(step) + COMMIT)
