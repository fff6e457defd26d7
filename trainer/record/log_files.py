"""The names of a run's logs and records, and the logs of all hosts in one. Importing this needs no torch."""

import heapq
import re
from collections.abc import Iterator

from shardset.errors import ConfigError
from shardset.storage.base import Storage

METRICS = "metrics.jsonl"
LOGS = "logs/"

_LOG_NAME = re.compile(r"logs/host-(\d+)\.log")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\S+")


def log_name(host: int) -> str:
    """`logs/host-000.log`."""
    return f"{LOGS}host-{host:03d}.log"


def merged_logs(storage: Storage) -> Iterator[str]:
    """The lines of all hosts' logs by time, each as `TIME host-000 TEXT`. Raises ConfigError if there are no logs."""
    logs = [(match[1], stat.name) for stat in storage.list(LOGS) if (match := _LOG_NAME.fullmatch(stat.name))]
    if not logs:
        raise ConfigError(
            f"{storage.url}: no {log_name(0)} there, expected the folder of a run; give the --run-dir of "
            "`python -m trainer train`"
        )
    stamped = [_stamped(f"host-{host}", storage.read(name).decode("utf-8", "replace")) for host, name in logs]
    return (line for _, line in heapq.merge(*stamped, key=lambda pair: pair[0]))


def _stamped(name: str, text: str) -> Iterator[tuple[str, str]]:
    """The time of each line, and `TIME NAME LINE`. A line without a time takes that of the line before it."""
    last = ""
    for line in text.splitlines():
        moment, _, rest = line.partition(" ")
        if not _TIME.fullmatch(moment):
            moment, rest = last, line
        last = moment
        yield moment, f"{moment} {name} {rest}"
