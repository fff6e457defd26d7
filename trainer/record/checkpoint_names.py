"""Names of the files and folders of checkpoints. Importing this needs no torch."""

import re
import uuid

from shardset.storage.base import Storage

FOLDER = "checkpoints/"
COMMIT = "commit.json"

_IN_CHECKPOINT = re.compile(r"checkpoints/step-(\d{9}|[1-9]\d{9,})/")
_STATE = re.compile(r".*/state-[0-9a-f]{12}\.pt")


def new_state_name() -> str:
    """`state-1f0c5a7be2d9.pt`: no other save has this name, be it of another run or of the same step again."""
    return f"state-{uuid.uuid4().hex[:12]}.pt"


def is_state(name: str) -> bool:
    """Whether a file in a checkpoint folder is named like a state."""
    return _STATE.fullmatch(name) is not None


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
