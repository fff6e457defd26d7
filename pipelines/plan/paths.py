"""The names of the files below `plan/`, relative to the output. They are private to the build."""

from shardset.format.naming import PLAN_FOLDER

BUILD = f"{PLAN_FOLDER}build.json"
SURVEY = f"{PLAN_FOLDER}survey.jsonl"
PLAN = f"{PLAN_FOLDER}plan.json"
REPLACED = f"{PLAN_FOLDER}replaced.json"
"""The manifest of a set that is being replaced.

It is removed last, after the files that it lists.
"""
BASE = f"{PLAN_FOLDER}base.json"
"""The manifest of the version that a build appends to."""
KNOWN = f"{PLAN_FOLDER}known.arrow"
"""What a build that appends has to know of the samples of that version."""

GROUPS = f"{PLAN_FOLDER}groups/"
"""How to write the shards of each build again."""

UNITS = f"{PLAN_FOLDER}units/"
RECORDS = f"{PLAN_FOLDER}done/"


def unit_path(unit: int) -> str:
    """The durable index of one unit of raw input."""
    return f"{UNITS}{unit:07d}.arrow"


def summary_path(unit: int) -> str:
    """The summary of a unit, written after its index."""
    return f"{PLAN_FOLDER}summaries/{unit:07d}.json"


def dropped_path(split: str) -> str:
    """The samples of a split that no shard stores, as JSON lines; absent if all are stored."""
    return f"{PLAN_FOLDER}dropped/{split}.jsonl"


def spool_path(unit: int | str) -> str:
    """The bytes of a unit, or of a bundle, that can't be read by range from the input, such as one
    of a compressed archive.
    """
    return f"{PLAN_FOLDER}spool/{unit:0>7}.bin"


def group_path(build: str) -> str:
    """How to write the shards of the build with that digest again."""
    return f"{GROUPS}{build}.json"


def references_path(shard: str) -> str:
    """The plan of the shard with that path: which raw bytes go to which position."""
    folder, _, name = shard.rpartition("/")
    return f"{PLAN_FOLDER}shards/{folder}-{name.removesuffix('.tar').rpartition('-')[2]}.arrow"


def record_path(split: str, number: int) -> str:
    """The record of a finished shard."""
    return f"{RECORDS}{split}-{number:06d}.json"
