"""The units of a survey as lines of `plan/survey.jsonl`, each read by its byte range.

A job lists blocks of lines, not units: Dataflow refuses a job above 20 MB, which two million units
would be.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO

from pipelines.plan import paths
from pipelines.plan.files import read_checked
from pipelines.sources.base import Unit
from shardset.checksum import extend_crc32c
from shardset.storage.base import ObjectWriter, Storage

BLOCK_BYTES = 4 << 20
"""About so many bytes of lines are a block, or one longer line."""


@dataclass(frozen=True, slots=True)
class UnitRef:
    """Neighbouring lines of the survey: the number of the first unit, their byte range, and its
    CRC32C.
    """

    number: int
    start: int
    stop: int
    crc32c: int

    def read(self, output: Storage) -> bytes:
        """The lines; ConfigError if their length or CRC32C differs in two reads."""
        return read_checked(output, paths.SURVEY, lambda: self._read(output))

    def _read(self, output: Storage) -> bytes:
        data = output.read(paths.SURVEY, self.start, self.stop)
        facts = len(data), extend_crc32c(0, data)
        if facts != (self.stop - self.start, self.crc32c):
            raise ValueError(
                f"bytes {self.start} to {self.stop} are {facts[0]} with the CRC32C {facts[1]:08x},"
                f" expected {self.crc32c:08x}"
            )
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenUnits:
    """The units of a survey, as they were written: their number, the SHA-256 of all lines, and the
    blocks.
    """

    num_units: int
    digest: str
    blocks: list[UnitRef]


def write_units(
    units: Iterable[Unit], file: IO[bytes] | ObjectWriter, block_bytes: int = BLOCK_BYTES
) -> WrittenUnits:
    """Writes the units as JSON lines, in blocks of about `block_bytes`."""
    hasher, blocks, number = hashlib.sha256(), [], 0
    block = UnitRef(0, 0, 0, 0)
    for number, unit in enumerate(units, 1):
        line = json.dumps(unit, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        hasher.update(line)
        file.write(line)
        block = replace(
            block, stop=block.stop + len(line), crc32c=extend_crc32c(block.crc32c, line)
        )
        if block.stop - block.start >= block_bytes:
            blocks.append(block)
            block = UnitRef(number, block.stop, block.stop, 0)
    if block.stop > block.start:
        blocks.append(block)
    return WrittenUnits(num_units=number, digest=hasher.hexdigest(), blocks=blocks)


def units_in(output: Storage, block: UnitRef) -> Iterator[UnitRef]:
    """The units of a block, one by one."""
    start = block.start
    for number, line in enumerate(block.read(output).splitlines(keepends=True), block.number):
        yield UnitRef(number, start, start + len(line), extend_crc32c(0, line))
        start += len(line)


def read_unit(output: Storage, unit: UnitRef) -> Unit:
    """One unit of the survey."""
    line: Unit = json.loads(unit.read(output))
    return line
