"""Writes one shard: a pure function of the plan and the raw bytes that it names."""

from collections.abc import Iterator
from itertools import tee

import google_crc32c
import msgspec
import pyarrow as pa

from pipelines.images.encode import UndecodableImage, encode, stored_field
from pipelines.plan import files, tables
from pipelines.plan.job import Job, put, record_of
from pipelines.plan.layout import SplitPlan
from pipelines.plan.tables import UnitRow
from pipelines.sources.base import Extent
from pipelines.write.range_reads import fetch
from shardset.checksum import crc32c_text
from shardset.errors import NotFound, SourceError
from shardset.format import naming
from shardset.format.manifest import IndexFile, Shard
from shardset.format.originals import stored_key
from shardset.format.tar import StoredSample, TarBuilder, index_to_bytes
from shardset.storage.base import ABSENT, Storage

_ROWS_IN_PYTHON = 512


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`plan/done/...`: a finished shard. Its `first_id` is 0 here; the commit counts it."""

    split: str
    number: int
    plan_digest: str
    num_content_bytes: int
    fields: list[str]
    shard: Shard


def write_shard(job: Job, plan_digest: str, plan: SplitPlan, number: int, num_classes: int) -> tuple[ShardRecord, bool]:
    """The record of a shard, and whether it was written now (False: an earlier try had finished it)."""
    name = naming.record_path(plan.name, number)
    found = files.find(job.output, name)
    if found and found.build == job.build:
        old: ShardRecord = record_of(job.output, name, found.content, ShardRecord)
        if old.plan_digest == plan_digest and _stands(job.output, old.shard):
            return old, False
    # What is not what its record says, or what another build left, is replaced; anybody else's file is not.
    record = _write(job, plan_digest, plan, number, num_classes, replace=found is not None)
    job.check_place()
    job.put(name, msgspec.json.encode(record))
    return record, True


def _write(job: Job, plan_digest: str, plan: SplitPlan, number: int, num_classes: int, *, replace: bool) -> ShardRecord:
    path = naming.shard_path(job.folder(plan.name), plan.name, number)
    builder = TarBuilder(plan.fields)
    counts = [0] * num_classes
    condition, of_index = (job.condition_of(name) if replace else ABSENT for name in (path, naming.index_path(path)))
    with job.output.writer(path, if_generation=condition) as out:
        for sample in _samples(job, plan.name, number):
            if sample.label >= 0:
                counts[sample.label] += 1
            out.write(builder.add(sample))
        out.write(builder.finish())
    index = index_to_bytes(builder.index())
    put(job.output, naming.index_path(path), index, if_generation=of_index)
    return ShardRecord(
        split=plan.name,
        number=number,
        plan_digest=plan_digest,
        num_content_bytes=builder.num_content_bytes,
        fields=builder.fields,
        shard=Shard(
            path=path,
            num_samples=plan.shard_size(number),
            num_bytes=builder.num_bytes,
            crc32c=builder.crc32c,
            sha256=builder.sha256,
            first_id=0,
            index=IndexFile(
                path=naming.index_path(path), num_bytes=len(index), crc32c=crc32c_text(google_crc32c.value(index))
            ),
            class_counts=counts,
        ),
    )


def _samples(job: Job, split: str, number: int) -> Iterator[StoredSample]:
    table = tables.references_from_bytes(job.read(naming.references_path(split, number)))
    references, ahead = tee(_references(table))
    wanted = ([place for _, place in row.content.fields if isinstance(place, Extent)] for row, *_ in ahead)
    contents = fetch(wanted, job.source.input, job.output)
    for (row, twin, source, copy), content in zip(references, contents, strict=True):
        fields = _stored_fields(job, row, content)
        yield StoredSample(key=stored_key(row, twin, copy), fields=fields, label=row.label, source=source, copy=copy)


def _references(table: pa.RecordBatch) -> Iterator[tuple[UnitRow, int, int, int]]:
    """Each row, its twins before it, its number and copy: as Python objects all of a shard's take many times the
    table's memory."""
    for some in tables.slices(table, [*range(0, len(table), _ROWS_IN_PYTHON), len(table)]):
        numbers = (tables.values(some[name]) for name in ("twin", "source", "copy"))
        yield from zip(tables.rows_of(some), *numbers, strict=True)


def _stored_fields(job: Job, row: UnitRow, contents: list[bytes]) -> list[tuple[str, bytes]]:
    left, image = iter(contents), row.content.image
    stored = stored_field(image, job.config.image) if image else ""
    fields = []
    for field, content in row.content.fields:
        data = next(left) if isinstance(content, Extent) else content
        if field == stored:
            fields.append(_encoded(job, row, data))
        else:
            fields.append((field, data))
    return fields


def _encoded(job: Job, row: UnitRow, data: bytes) -> tuple[str, bytes]:
    try:
        return encode(data, row.content.image, row.fix, job.config.image)
    except UndecodableImage as error:
        raise SourceError(
            f"{row.name}: can't be stored as {stored_field(row.content.image, job.config.image)}: {error}; "
            "build again with --verify decode, which puts such images into quarantine, and --overwrite"
        ) from error


def _stands(output: Storage, shard: Shard) -> bool:
    return all(
        _has(output, path, num_bytes, crc32c)
        for path, num_bytes, crc32c in (
            (shard.path, shard.num_bytes, shard.crc32c),
            (shard.index.path, shard.index.num_bytes, shard.index.crc32c),
        )
    )


def _has(output: Storage, path: str, num_bytes: int, crc32c: str) -> bool:
    try:
        found = output.stat(path)
    except NotFound:
        return False
    if found.num_bytes != num_bytes:
        return False
    known = found.crc32c or _crc32c(output, path, num_bytes)
    return known == crc32c


def _crc32c(storage: Storage, path: str, num_bytes: int) -> str:
    crc, step = 0, 8 * 2**20
    for start in range(0, num_bytes, step):
        crc = google_crc32c.extend(crc, storage.read(path, start, min(start + step, num_bytes)))
    return crc32c_text(crc)
