"""Spools for tests of sources, and what sources give."""

import json
import pickle

from pipelines.sources.base import SPOOL, Extent, RawSample, Rejected, Source, Survey


class MemorySpool:
    """Keeps what it is given; `content(extent)` gives it back."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, content: bytes) -> Extent:
        """Where the bytes stand in `data`."""
        extent = Extent(SPOOL, "", len(self.data), len(content))
        self.data += content
        return extent

    def show(self, extent: Extent, content: bytes) -> None:
        """Keeps nothing of the input."""

    def content(self, extent: Extent) -> bytes:
        """The bytes of an extent of this spool."""
        return bytes(self.data[extent.offset : extent.offset + extent.num_bytes])


def read(source: Source, spool: MemorySpool | None = None) -> list:
    """All samples, as workers have them: the source pickled, the units as JSON."""
    spool, worker = spool or MemorySpool(), pickle.loads(pickle.dumps(source))
    units = json.loads(json.dumps([*source.survey().units]))
    return [sample for unit in units for sample in worker.index(unit, spool)]


def everything(source: Source) -> tuple[Survey, list[RawSample], list[Rejected]]:
    """What a source says of itself, its samples, and what it rejects."""
    found = read(source)
    samples = [entry for entry in found if isinstance(entry, RawSample)]
    return source.survey(), samples, [entry for entry in found if isinstance(entry, Rejected)]


def contents(source: Source, sample: RawSample) -> dict[str, bytes]:
    """The fields of a sample, read from the input."""

    def stored(found: Extent | bytes) -> bytes:
        if isinstance(found, bytes):
            return found
        stop = found.offset + found.num_bytes
        return source.input.read(found.object, found.offset, stop, generation=found.generation)

    return {field: stored(found) for field, found in sample.fields.items()}
