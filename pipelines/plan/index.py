"""Indexes one unit: what it holds, what of it is bad, and where its bytes are."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import google_crc32c
import msgspec

from pipelines.images.check import examine, marks_of
from pipelines.images.options import ImageOptions, stored_field
from pipelines.plan import tables
from pipelines.plan.job import Job, UnitRef, read_unit, record_of
from pipelines.plan.layout import MAX_REASONS, SplitCount, UnitSummary
from pipelines.plan.tables import Content, UnitRow
from pipelines.sources.base import SPOOL, Extent, RawSample, Rejected
from pipelines.write.range_reads import SPOOLED, fetch
from shardset.errors import SourceError, UndecodableImage
from shardset.format import naming
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.tar import MAX_MEMBER_BYTES
from shardset.storage.base import Storage, Writer

BATCH = 64

MAX_INLINE_BYTES = 1024
"""Up to so many bytes of a field stand in the row of their sample, more in the unit's spool: rows of many units are in
memory at once."""

_AS_IT_IS = ImageOptions()
"""What becomes of a sample's images beside the first, but for the memory that they may take."""


class UnitSpool:
    """Takes bytes that can't be range-read from the input and lays them out in one object of the plan."""

    def __init__(self, output: Storage, unit: int, stack: ExitStack) -> None:
        self._open = lambda: stack.enter_context(output.writer(naming.spool_path(unit)))
        self._writer: Writer | None = None
        self._size = 0
        self.recent: dict[int, bytes] = {}
        """What was added of late, by its offset."""

    def add(self, content: bytes) -> Extent:
        """Where `content` will stand."""
        if self._writer is None:
            self._writer = self._open()
        self._writer.write(content)
        self.recent[self._size] = content
        extent = Extent(SPOOL, "", self._size, len(content), google_crc32c.value(content))
        self._size += len(content)
        return extent


def index_unit(job: Job, line: UnitRef) -> UnitSummary:
    """Indexes a unit and writes its index and summary, unless an earlier try of the same build left them."""
    name = naming.summary_path(line.number)
    found = job.find(name)
    if found is not None:
        return record_of(job.output, name, found, UnitSummary)
    summary = summarize(line.number, *_indexed(job, line))
    job.put(name, msgspec.json.encode(summary))
    return summary


def summarize(unit: int, rows: Sequence[UnitRow], rejected: Sequence[dict[str, Any]]) -> UnitSummary:
    """The summary of a unit."""
    bad = Counter(entry["split"] for entry in rejected)
    found: dict[str, list[UnitRow]] = {split: [] for split in sorted({row.split for row in rows} | bad.keys())}
    for row in rows:
        found[row.split].append(row)
    return UnitSummary(
        unit=unit,
        splits={split: _count(mine, bad[split]) for split, mine in found.items()},
        fields={
            split: list(dict.fromkeys(field for row in mine for field, _ in row.content.fields))
            for split, mine in found.items()
        },
        fixes=dict(sorted(Counter(mark for row in rows for mark in marks_of(row.fix)).items())),
        reasons=[f"{entry['name']}: {entry['reason']}" for entry in rejected[:MAX_REASONS]],
        max_label=max((row.label for row in rows), default=-1),
        digest=tables.digest_of(rows),
    )


def _count(rows: Sequence[UnitRow], num_rejected: int) -> SplitCount:
    return SplitCount(
        num_samples=len(rows),
        num_rejected=num_rejected,
        num_bytes=sum(row.content.num_bytes for row in rows),
        strata=dict(sorted(Counter(row.label for row in rows).items())),
    )


def _indexed(job: Job, line: UnitRef) -> tuple[list[UnitRow], list[dict[str, Any]]]:
    name = naming.unit_path(line.number)
    found = job.find(name)
    if found is None:
        rows, rejected = _index(job, line)
        job.put(name, tables.unit_to_bytes(tables.unit_table(rows, rejected)))
        return rows, rejected
    table = tables.unit_from_bytes(found)
    return tables.rows_of(table), tables.rejected_of(table)


def _index(job: Job, line: UnitRef) -> tuple[list[UnitRow], list[dict[str, Any]]]:
    unit = read_unit(job.output, line)
    rows: list[UnitRow] = []
    rejected: list[dict[str, Any]] = []
    with ExitStack() as stack:
        spool = UnitSpool(job.output, line.number, stack)
        samples = job.source.index(unit, spool)
        for batch in _batches(samples):
            for found in _examine_batch(job, line.number, batch, spool):
                if isinstance(found, UnitRow):
                    rows.append(found)
                else:
                    rejected.append(found)
            spool.recent.clear()
    return rows, rejected


def _batches(samples: Iterable[Any]) -> Iterator[list[Any]]:
    left = iter(samples)
    while batch := list(islice(left, BATCH)):
        yield batch


def _examine_batch(
    job: Job, unit: int, batch: list[RawSample | Rejected], spool: UnitSpool
) -> Iterator[UnitRow | dict[str, Any]]:
    batch = [_too_large(found) or found for found in batch]
    contents = fetch([_to_read(job, found) for found in batch], job.source.input, job.output)
    for found, content in zip(batch, contents, strict=True):
        if isinstance(found, Rejected):
            yield _rejected(found, content[0] if content else b"")
            continue
        row = _row(job, unit, found, _contents(found, content, spool.recent), spool)
        if isinstance(row, dict) and content:  # it may have been damaged on its way only
            [again] = fetch([_to_read(job, found)], job.source.input, job.output)
            row = row if again == content else _row(job, unit, found, _contents(found, again, spool.recent), spool)
        yield row


def _too_large(found: RawSample | Rejected) -> Rejected | None:
    """A sample with a field that no tar can hold, as Rejected; its bytes are not even read to say their hash."""
    if isinstance(found, Rejected):
        return None
    for field, content in found.fields.items():
        num_bytes = content.num_bytes if isinstance(content, Extent) else len(content)
        if num_bytes > MAX_MEMBER_BYTES:
            reason = f"its {field} has {num_bytes} bytes, a member of a tar at most {MAX_MEMBER_BYTES}"
            return Rejected(name=found.name, split=found.split, reason=reason)
    return None


def _image_fields(sample: RawSample) -> list[str]:
    """The field that is the sample's image, and any others that hold one, in member order."""
    return [field for field in sample.fields if field == sample.image or field.rpartition(".")[2] in FIELD_OF_EXTENSION]


def _to_read(job: Job, found: RawSample | Rejected) -> list[Extent]:
    wanted: list[Extent | bytes | None]
    if isinstance(found, Rejected):
        wanted = [found.extent]
    else:
        wanted = [] if job.config.verify == "none" else list(found.fields.values())
    return [extent for extent in wanted if isinstance(extent, Extent) and extent.object != SPOOL]


def _contents(sample: RawSample, read: Iterable[bytes], recent: dict[int, bytes]) -> dict[str, bytes]:
    """The contents of its fields: those that were read, and those at hand."""
    left, found = iter(read), {}
    for field, given in sample.fields.items():
        content: Extent | bytes | None = given
        if isinstance(content, Extent):
            content = recent.get(content.offset) if content.object == SPOOL else next(left, None)
        if content is not None:
            found[field] = content
    return found


def _row(
    job: Job, unit: int, sample: RawSample, contents: dict[str, bytes], spool: UnitSpool
) -> UnitRow | dict[str, Any]:
    _check_sample(sample)
    options, seen = job.config.image, {}
    for field in _image_fields(sample):
        data, mine = contents.get(field), field == sample.image
        if data is None:
            continue
        try:
            wanted = options if mine else replace(_AS_IT_IS, decoded_bytes=options.decoded_bytes)
            seen[field] = examine(data, field=field, verify=job.config.verify, options=wanted)
        except UndecodableImage as error:
            return _refused(sample, field, data, str(error) if mine else f"its {field}: {error}")
    raw = contents.get(sample.image)
    image = seen.get(sample.image) or examine(b"", field=sample.image, verify="none", options=options)
    stored = stored_field(image.field, options) if image.field else ""
    if stored != sample.image and stored in sample.fields:
        return _refused(sample, sample.image, raw, f"its image would be stored as {stored}, which it has already")
    return UnitRow(
        split=sample.split,
        name=sample.name,
        key=sample.key,
        label=int(sample.label),
        fix=image.marks,
        content=Content(
            image=image.field,
            fields=[
                (stored if field == sample.image else field, _placed(content, contents.get(field), unit, spool))
                for field, content in fields_of(sample)
            ],
        ),
    )


def _refused(sample: RawSample, field: str, data: bytes | None, reason: str) -> dict[str, Any]:
    """A sample as rejected for one of its fields; `data` is None if that was not read."""
    extent = sample.fields[field]
    known = extent if data is not None and isinstance(extent, Extent) else None
    return _rejected(Rejected(name=sample.name, split=sample.split, reason=reason, extent=known), data or b"")


def fields_of(sample: RawSample) -> list[tuple[str, Extent | bytes]]:
    """The fields that are stored, in member order: those of the sample, and its label as `cls`."""
    fields = list(sample.fields.items())
    if sample.label >= 0 and "cls" not in sample.fields:
        after = 1 + [*sample.fields].index(sample.image) if sample.image in sample.fields else 0
        fields.insert(after, ("cls", b"%d" % sample.label))
    return fields


def _placed(content: Extent | bytes, data: bytes | None, unit: int, spool: UnitSpool) -> Extent | bytes:
    """The content as the plan names it: bytes of a unit's spool stand in an object of the plan.

    `data` are its bytes, where they were read: the plan keeps their CRC32C.
    """
    if isinstance(content, Extent) and data is not None:
        content = msgspec.structs.replace(content, crc32c=google_crc32c.value(data))
    if isinstance(content, bytes) and len(content) > MAX_INLINE_BYTES:
        content = spool.add(content)
    if isinstance(content, Extent) and content.object == SPOOL:
        return msgspec.structs.replace(content, object=SPOOLED + naming.spool_path(unit))
    return content


def _rejected(found: Rejected, data: bytes) -> dict[str, Any]:
    extent = found.extent
    return {
        "name": found.name,
        "split": found.split,
        "reason": found.reason,
        "object": extent.object if extent else None,
        "offset": extent.offset if extent else None,
        "num_bytes": extent.num_bytes if extent else None,
        "sha256": hashlib.sha256(data).hexdigest() if extent else None,
    }


def _check_sample(sample: RawSample) -> None:
    if not naming.is_split(sample.split):
        raise SourceError(
            f"{sample.name}: split {sample.split!r} can't name a folder; "
            "use letters, digits, - and _ (at most 40, not plan)"
        )
    for field in sample.fields:
        if not naming.is_field(field):
            raise SourceError(
                f"{sample.name}: field {field!r} can't be an extension; use lower-case letters and digits"
            )
