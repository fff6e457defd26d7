"""The names of the files below `plan/`: private to the build, relative to the output, always with `/`.

`naming` has the names of a shard set, and the one file here that a reader looks into: the references of a shard.
"""

import re

from shardset.format.naming import PLAN_FOLDER

BUILD = f"{PLAN_FOLDER}build.json"
SURVEY = f"{PLAN_FOLDER}survey.jsonl"
PLAN = f"{PLAN_FOLDER}plan.json"
REJECTED = f"{PLAN_FOLDER}rejected.jsonl"
REPLACED = f"{PLAN_FOLDER}replaced.json"
"""The manifest of the set that a build replaces. Its files go once the new manifest stands, then this one goes too."""

UNITS = f"{PLAN_FOLDER}units/"
RECORDS = f"{PLAN_FOLDER}done/"
PARTITIONS = f"{PLAN_FOLDER}partitions/"
"""What the steps of one run leave for each other; removed at its end."""

_FILE = re.compile(
    r"plan/((build|plan|replaced)\.json|(survey|rejected)\.jsonl|"
    r"(units|summaries|partitions|parts|dropped|spool|shards|done)/[A-Za-z0-9_-]+\.(arrow|json|jsonl|bin))",
    re.ASCII,
)
"""`parts` is what earlier versions called the partitions."""


def is_plan_file(path: str) -> bool:
    """Whether `path` is spelled like a file of a build's plan."""
    return _FILE.fullmatch(path) is not None


def unit_path(unit: int) -> str:
    """The durable index of one unit of raw input."""
    return f"{UNITS}{unit:07d}.arrow"


def summary_path(unit: int) -> str:
    """What the plan needs to know of one unit, written after its index."""
    return f"{PLAN_FOLDER}summaries/{unit:07d}.json"


def partition_path(kind: str, number: int) -> str:
    """What one call of a step leaves for the next step: one byte range for each receiver."""
    return f"{PARTITIONS}{kind}-{number:07d}.bin"


def dropped_path(unit: int) -> str:
    """The samples of a unit that no shard stores, as JSON lines; absent if all are stored."""
    return f"{PLAN_FOLDER}dropped/{unit:07d}.jsonl"


def spool_path(unit: int) -> str:
    """The bytes of a unit that can't be read by range from the input."""
    return f"{PLAN_FOLDER}spool/{unit:07d}.bin"


def record_path(split: str, number: int) -> str:
    """The record of a finished shard, as it will stand in the manifest."""
    return f"{RECORDS}{split}-{number:06d}.json"
