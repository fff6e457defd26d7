"""The units of a survey as lines of `plan/survey.jsonl`, each read by its byte range."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

from pipelines.plan import paths
from pipelines.plan.partitions import ByteRange, read_range
from pipelines.sources.base import Unit
from shardset.checksum import extend_crc32c
from shardset.storage.base import Storage


@dataclass(frozen=True, slots=True)
class UnitRef:
    """A unit of the survey: its number, and the byte range and CRC32C of its line."""

    number: int
    start: int
    stop: int
    crc32c: int


def write_units(units: Iterable[Unit], file: IO[bytes]) -> tuple[str, list[UnitRef]]:
    """Writes the units as JSON lines; returns the SHA-256 of all lines, and a reference to each."""
    hasher, references, start = hashlib.sha256(), [], 0
    for number, unit in enumerate(units):
        line = json.dumps(unit, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        references.append(UnitRef(number, start, start + len(line), extend_crc32c(0, line)))
        start += len(line)
        hasher.update(line)
        file.write(line)
    return hasher.hexdigest(), references


def read_unit(output: Storage, unit: UnitRef) -> Unit:
    """One unit of the survey."""
    line: Unit = json.loads(read_range(output, ByteRange(paths.SURVEY, unit.start, unit.stop, unit.crc32c)))
    return line
