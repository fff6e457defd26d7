"""The names of the files in a run folder, and what they say. Importing this needs no torch."""

import re
from collections.abc import Iterable

from shardset.storage.base import Storage
from trainer.config import not_a_run

METRICS = "metrics.jsonl"
LOGS = "logs/"
CHECKPOINTS = "checkpoints/"
COMMIT = "commit.json"
_LOG_NAME = re.compile(r"logs/host-(\d+)\.log")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\S+")
_IN_CHECKPOINT = re.compile(r"checkpoints/step-(\d{9}|[1-9]\d{9,})/")


def folder_of(step: int) -> str:
    """`checkpoints/step-000000123/`."""
    return f"{CHECKPOINTS}step-{step:09d}/"


def step_of(name: str) -> int | None:
    """The step of the checkpoint that a file belongs to; None if it does not lie in a checkpoint
    folder.
    """
    match = _IN_CHECKPOINT.match(name)
    return int(match[1]) if match else None


def steps(storage: Storage) -> list[int]:
    """The steps of the checkpoints in a run folder that have a commit mark, damaged or not; oldest
    first.
    """
    return steps_among(stat.name for stat in storage.list(CHECKPOINTS))


def steps_among(names: Iterable[str]) -> list[int]:
    """The steps whose commit marks are among some names; oldest first."""
    return sorted(
        step
        for name in names
        if (step := step_of(name)) is not None and name == folder_of(step) + COMMIT
    )


def log_name(host: int) -> str:
    """`logs/host-000.log`."""
    return f"{LOGS}host-{host:03d}.log"


def merged_logs(storage: Storage) -> list[str]:
    """The lines of all hosts' logs by time, each as `TIME host-000 TEXT`.

    Raises ConfigError if there are no logs.

    A line without a time gets the time of the line before it.
    """
    logs = [
        (match[1], stat.name)
        for stat in storage.list(LOGS)
        if (match := _LOG_NAME.fullmatch(stat.name))
    ]
    if not logs:
        raise not_a_run(storage, log_name(0))
    lines = []
    for host, name in logs:
        last = ""
        for line in storage.read(name).decode("utf-8", "replace").splitlines():
            moment, _, text = line.partition(" ")
            if not _TIME.fullmatch(moment):
                moment, text = last, line
            last = moment
            lines.append((moment, f"{moment} host-{host} {text}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]
