"""Writes a shard. Its bytes depend only on the plan and on the raw bytes that the plan names."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
from pipelines.plan.plan_records import Build, BuildFile, PlanFile, ShardRecord
from pipelines.plan.range_reads import SPOOLED, fetch
from pipelines.plan.tables import REFERENCE, SampleRow
from pipelines.sources.base import Extent
from shardset.errors import NotFound, PreconditionFailed, SourceError, UndecodableImage
from shardset.format import naming, write
from shardset.format.manifest import IndexFile, Shard
from shardset.format.rows import Origin, numbers
from shardset.format.tar import StoredSample
from shardset.format.write import OpenWriter, WrittenShard
from shardset.read.indexes import read_index
from shardset.storage.base import ABSENT, Storage
from shardset.storage.checked import stored_crc32c

_CHUNK_ROWS = 512


class FinishedShard(NamedTuple):
    """A shard and the labels of its samples; `is_new` unless an earlier attempt wrote it."""

    written: WrittenShard
    labels: NDArray[np.int64]
    is_new: bool


def write_shard(build: Build, plan: PlanFile, split: str, number: int) -> FinishedShard:
    """Writes a shard, unless an earlier attempt had finished it.

    Only a build that resumes looks for shards that it has finished; another one meets them, or late
    files of the build before it, when it writes.
    """
    output, replaces = build.files.output, build.file.replaces
    create = partial(output.writer, if_generation=ABSENT)
    if not build.resumes and not replaces:
        with suppress(PreconditionFailed):
            return _write(build, plan, split, number, create)
    name = paths.record_path(split, number)
    # Replaces a shard that does not match its record, or that another build wrote; never a file of
    # unknown origin.
    file = plan_files.find(output, name)
    if file and file.build == build.files.build:
        old = plan_files.decode_record(output, name, file.content, ShardRecord)
        shard = old.written.shard
        if old.plan_digest == plan.digest and all(
            is_stored(output, each) for each in (shard, shard.index)
        ):
            labels = numbers(read_index(output, shard, ["label"]), "label")
            return FinishedShard(old.written, labels, is_new=False)
    return _write(build, plan, split, number, build.files.writer if file or replaces else create)


def _write(
    build: Build, plan: PlanFile, split: str, number: int, writer: OpenWriter
) -> FinishedShard:
    path = naming.shard_path(split + build.file.suffix, split, number)
    planned = PlannedSamples(build.files, build.source.input, build.config.image, build.file)
    samples = planned.read(split, path)
    written, labels = write.write_shard(path, samples, plan.splits[split].fields, writer)
    record = ShardRecord(plan_digest=plan.digest, written=written)
    build.files.write(paths.record_path(split, number), msgspec.json.encode(record))
    return FinishedShard(written, labels, is_new=True)


@dataclass(frozen=True, slots=True)
class PlannedSamples:
    """The samples of the shards of a build; `build` has no classes."""

    files: PlanFiles
    input: Storage
    image: ImageOptions
    build: BuildFile

    def read(self, split: str, path: str, *, is_new: bool = True) -> Iterator[StoredSample]:
        """The samples of the shard at a path, by its references.

        Those of a new one must have keys that no sample of the set has. To repair one, only the
        bytes of raw objects must be the same, not their generations.
        """
        table = tables.from_bytes(self.files.read(paths.references_path(path)), REFERENCE)
        references, ahead = tee(_references(table))
        appends = self.build.appends
        first_source = appends.num_source_samples.get(split, 0) if appends else 0
        extents = (
            [
                part if is_new else msgspec.structs.replace(part, generation="")
                for _, part in row.fields
                if isinstance(part, Extent)
            ]
            for row, _, _ in ahead
        )
        contents = fetch(extents, self.input, self.files.output)
        for (row, serial, copy), content in zip(references, contents, strict=True):
            key, fields = row.stored_key(copy), self._fields(row, content)
            if is_new and appends and row.occurrence:
                refuse_known_key(self.files, row, key)
            yield StoredSample(
                key=key,
                fields=fields,
                label=row.label,
                serial=first_source + serial,
                copy=copy,
                origin=_origin(row),
            )

    def _fields(self, row: SampleRow, contents: list[bytes]) -> list[tuple[str, bytes]]:
        fetched, image = iter(contents), row.image
        stored = stored_field(image, self.image) if image else ""
        fields = []
        for field, content in row.fields:
            data = next(fetched) if isinstance(content, Extent) else content
            fields.append(self._encode(row, data) if field == stored else (field, data))
        return fields

    def _encode(self, row: SampleRow, data: bytes) -> tuple[str, bytes]:
        try:
            return encode(data, row.image, row.fix, self.image)
        except UndecodableImage as error:
            raise SourceError(
                f"{row.name}: can't be stored as {stored_field(row.image, self.image)}:"
                f" {error}; build again with --verify decode, which puts such images into"
                " quarantine, and --overwrite"
            ) from error


def _origin(row: SampleRow) -> Origin:
    """Where the image of a sample comes from; its object is not named where it has the same name,
    or where the source has unpacked it.
    """
    image, fix = row.raw_image, row.fix or None
    if isinstance(image, bytes):
        return Origin(name=row.name, num_bytes=len(image), fix=fix)
    if image.object.startswith(SPOOLED):
        return Origin(name=row.name, num_bytes=image.num_bytes, fix=fix)
    return Origin(
        name=row.name,
        object=None if image.object == row.name else image.object,
        generation=image.generation,
        offset=image.offset,
        num_bytes=image.num_bytes,
        fix=fix,
    )


def _references(table: pa.RecordBatch) -> Iterator[tuple[SampleRow, int, int]]:
    """Each row with its serial and its copy number."""
    # In chunks: the Python objects of a whole shard take many times the memory of its table.
    for start in range(0, len(table), _CHUNK_ROWS):
        chunk = table.slice(start, _CHUNK_ROWS)
        numbers = (tables.values(chunk[name]) for name in ("serial", "copy"))
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
