"""Writes a shard. Its bytes depend only on the plan and on the raw bytes that the plan names."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import tee
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.images.encode import encode
from pipelines.images.options import ImageOptions, stored_field
from pipelines.plan import files as plan_files
from pipelines.plan import paths, tables
from pipelines.plan.append import refuse_known_key
from pipelines.plan.files import PlanFiles
from pipelines.plan.frames import stored_key
from pipelines.plan.range_reads import SPOOLED, fetch
from pipelines.plan.records import BuildFile, PlanFile, ShardRecord
from pipelines.plan.tables import UnitRow
from pipelines.sources.base import Extent
from shardset.errors import NotFound, PreconditionFailed, SourceError, UndecodableImage
from shardset.format import naming
from shardset.format.manifest import IndexFile, Shard
from shardset.format.rows import Origin, numbers
from shardset.format.tar import StoredSample
from shardset.format.write import OpenWriter, write_shard
from shardset.read.indexes import read_index
from shardset.storage.base import ABSENT, ObjectWriter, Storage
from shardset.storage.checked import stored_crc32c

_CHUNK_ROWS = 512


class FinishedShard(NamedTuple):
    """A shard and the labels of its samples; `is_new` unless an earlier attempt wrote it."""

    shard: Shard
    labels: NDArray[np.int64]
    is_new: bool


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """Writes the shards of a build; pickles.

    `build` travels without its classes. Only a build that `resumes` looks for shards that it has
    finished; another one meets them, or late files of the build before it, when it writes.
    """

    files: PlanFiles
    input: Storage
    image: ImageOptions
    build: BuildFile
    resumes: bool

    def write(self, plan: PlanFile, split: str, number: int) -> FinishedShard:
        """Writes a shard, unless an earlier attempt had finished it."""
        if not self.resumes and not self.build.replaces:
            with suppress(PreconditionFailed):
                return self._write(plan, split, number, self._create)
        name, output = paths.record_path(split, number), self.files.output
        # Replaces a shard that does not match its record, or that another build wrote; never a file
        # of unknown origin.
        file = plan_files.find(output, name)
        if file and file.build == self.files.build:
            old = plan_files.decode_record(output, name, file.content, ShardRecord)
            shard = old.written.shard
            if old.plan_digest == plan.digest and all(
                is_stored(output, each) for each in (shard, shard.index)
            ):
                labels = numbers(read_index(output, shard, ["label"]), "label")
                return FinishedShard(shard, labels, is_new=False)
        writer = self.files.writer if file or self.build.replaces else self._create
        return self._write(plan, split, number, writer)

    def _create(self, name: str) -> ObjectWriter:
        return self.files.output.writer(name, if_generation=ABSENT)

    def _write(self, plan: PlanFile, split: str, number: int, writer: OpenWriter) -> FinishedShard:
        path = naming.shard_path(split + self.build.suffix, split, number)
        fields = plan.splits[split].fields
        written, labels = write_shard(path, self.samples(split, path), fields, writer)
        record = ShardRecord(plan_digest=plan.digest, written=written)
        self.files.write(paths.record_path(split, number), msgspec.json.encode(record))
        return FinishedShard(written.shard, labels, is_new=True)

    def samples(self, split: str, path: str, *, is_new: bool = True) -> Iterator[StoredSample]:
        """The samples of the shard at a path, by its references.

        Those of a new one must have keys that no sample of the set has. To repair one, only the
        bytes of raw objects must be the same, not their generations.
        """
        table = tables.references_from_bytes(self.files.read(naming.references_of(path)))
        references, ahead = tee(_references(table))
        appends = self.build.appends
        first_source = appends.num_source_samples.get(split, 0) if appends else 0
        extents = (
            [
                part if is_new else msgspec.structs.replace(part, generation="")
                for _, part in row.content.fields
                if isinstance(part, Extent)
            ]
            for row, *_ in ahead
        )
        contents = fetch(extents, self.input, self.files.output)
        for (row, duplicate_number, source, copy), content in zip(
            references, contents, strict=True
        ):
            key, fields = stored_key(row, duplicate_number, copy), self._fields(row, content)
            if is_new and appends and duplicate_number:
                refuse_known_key(self.files, row, key)
            yield StoredSample(
                key=key,
                fields=fields,
                label=row.label,
                serial=first_source + source,
                copy=copy,
                origin=_origin(row),
            )

    def _fields(self, row: UnitRow, contents: list[bytes]) -> list[tuple[str, bytes]]:
        fetched, image = iter(contents), row.content.image
        stored = stored_field(image, self.image) if image else ""
        fields = []
        for field, content in row.content.fields:
            data = next(fetched) if isinstance(content, Extent) else content
            fields.append(self._encode(row, data) if field == stored else (field, data))
        return fields

    def _encode(self, row: UnitRow, data: bytes) -> tuple[str, bytes]:
        try:
            return encode(data, row.content.image, row.fix, self.image)
        except UndecodableImage as error:
            raise SourceError(
                f"{row.name}: can't be stored as {stored_field(row.content.image, self.image)}:"
                f" {error}; build again with --verify decode, which puts such images into"
                " quarantine, and --overwrite"
            ) from error


def _origin(row: UnitRow) -> Origin:
    """Where the image of a sample comes from; its object is not named where it has the same name,
    or where the source has unpacked it.
    """
    found, fix = row.content.raw_image, row.fix or None
    if not isinstance(found, Extent):
        return Origin(name=row.name, num_bytes=len(found), fix=fix)
    if found.object.startswith(SPOOLED):
        return Origin(name=row.name, num_bytes=found.num_bytes, fix=fix)
    return Origin(
        name=row.name,
        object=None if found.object == row.name else found.object,
        generation=found.generation,
        offset=found.offset,
        num_bytes=found.num_bytes,
        fix=fix,
    )


def _references(table: pa.RecordBatch) -> Iterator[tuple[UnitRow, int, int, int]]:
    """Each row with its duplicate number, its source number and its copy number."""
    # In chunks: the Python objects of a whole shard take many times the memory of its table.
    for start in range(0, len(table), _CHUNK_ROWS):
        chunk = table.slice(start, _CHUNK_ROWS)
        numbers = (tables.values(chunk[name]) for name in ("occurrence", "source", "copy"))
        yield from zip(tables.rows_of(chunk), *numbers, strict=True)


def is_stored(output: Storage, file: Shard | IndexFile) -> bool:
    """Whether the tar or index exists with the size and CRC32C of its record."""
    try:
        stat = output.stat(file.path)
    except NotFound:
        return False
    if stat.num_bytes != file.num_bytes:
        return False
    return (stat.crc32c or stored_crc32c(output, file.path, file.num_bytes)) == file.crc32c
