"""Indexes one unit: which samples it holds, which of them are bad, and where their bytes are."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import msgspec

from pipelines.config import BuildConfig
from pipelines.images.check import Examined, examine
from pipelines.images.options import ImageOptions, Verify, stored_field
from pipelines.plan import paths, tables
from pipelines.plan.files import PlanFiles
from pipelines.plan.summaries import UnitSummary, summarize
from pipelines.plan.survey import UnitRef, read_unit
from pipelines.plan.tables import Content, QuarantineEntry, UnitRow
from pipelines.sources.base import SPOOL, Extent, RawSample, Rejected, Source
from pipelines.write.range_reads import SPOOLED, fetch
from shardset.checksum import crc32c_of
from shardset.errors import SourceError, UndecodableImage
from shardset.format import naming
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.tar import MAX_MEMBER_BYTES
from shardset.storage.base import Storage, Writer

T = TypeVar("T")

BATCH = 64

MAX_INLINE_BYTES = 1024
"""A field of at most this many bytes is kept in the row of its sample, a larger one in the unit's spool: planning holds
the rows of many units in memory at once."""

_UNCHANGED = ImageOptions()
"""The options for a sample's further images, apart from the memory that they may take."""


class UnitSpool:
    """Takes bytes that can't be read by range from the input, and lays them out in one object of the plan."""

    def __init__(self, output: Storage, unit: int, stack: ExitStack) -> None:
        self._open: Callable[[], Writer] = lambda: stack.enter_context(output.writer(paths.spool_path(unit)))
        self._writer: Writer | None = None
        self._size = 0
        self.recent: dict[int, bytes] = {}
        """The contents of the current batch, by offset."""

    def add(self, content: bytes) -> Extent:
        """The extent at which `content` will be stored."""
        if self._writer is None:
            self._writer = self._open()
        self._writer.write(content)
        self.recent[self._size] = content
        extent = Extent(SPOOL, "", self._size, len(content), crc32c_of(content))
        self._size += len(content)
        return extent


def index_unit(files: PlanFiles, source: Source, config: BuildConfig, unit: UnitRef) -> UnitSummary:
    """Writes a unit's table and summary, unless an earlier attempt of the same build left them; returns the summary."""
    name = paths.summary_path(unit.number)
    summary = files.find_record(name, UnitSummary)
    if summary is None:
        summary = summarize(unit.number, *_find_or_index(files, source, config, unit))
        files.write(name, msgspec.json.encode(summary))
    return summary


def fields_of(sample: RawSample) -> list[tuple[str, Extent | bytes]]:
    """The stored fields in member order: those of the sample, and its label as `cls`."""
    fields = list(sample.fields.items())
    if sample.label >= 0 and "cls" not in sample.fields:
        after = 1 + [*sample.fields].index(sample.image) if sample.image in sample.fields else 0
        fields.insert(after, ("cls", b"%d" % sample.label))
    return fields


def _find_or_index(
    files: PlanFiles, source: Source, config: BuildConfig, unit: UnitRef
) -> tuple[list[UnitRow], list[QuarantineEntry]]:
    name = paths.unit_path(unit.number)
    content = files.find(name)
    if content is not None:
        table = tables.unit_from_bytes(content)
        return tables.rows_of(table), tables.rejected_of(table)
    rows, rejected = _index(files.output, source, config, unit)
    files.write(name, tables.unit_to_bytes(tables.unit_table(rows, rejected)))
    return rows, rejected


def _index(
    output: Storage, source: Source, config: BuildConfig, unit: UnitRef
) -> tuple[list[UnitRow], list[QuarantineEntry]]:
    rows: list[UnitRow] = []
    rejected: list[QuarantineEntry] = []
    with ExitStack() as stack:
        spool = UnitSpool(output, unit.number, stack)
        examiner = _Examiner(config.verify, config.image, source.input, output, unit.number, spool)
        for batch in _batches(source.index(read_unit(output, unit), spool)):
            for row in examiner.rows(batch):
                if isinstance(row, UnitRow):
                    rows.append(row)
                else:
                    rejected.append(row)
            spool.recent.clear()
    return rows, rejected


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    remaining = iter(items)
    while batch := list(islice(remaining, BATCH)):
        yield batch


@dataclass(frozen=True, slots=True)
class _Examiner:
    """Reads the samples of one unit and turns each into a row, or into the reason why it is rejected."""

    verify: Verify
    options: ImageOptions
    input: Storage
    output: Storage
    unit: int
    spool: UnitSpool

    def rows(self, batch: Iterable[RawSample | Rejected]) -> Iterator[UnitRow | QuarantineEntry]:
        """A row or a quarantine entry for each sample, in order."""
        samples = [_too_large(sample) or sample for sample in batch]
        for sample, contents in zip(samples, self._fetch(samples), strict=True):
            if isinstance(sample, Rejected):
                yield _entry(sample, contents[0] if contents else b"")
                continue
            row = self._row(sample, contents)
            if not isinstance(row, UnitRow) and contents:  # the bytes may be damaged by this read only
                [again] = self._fetch([sample])
                row = row if again == contents else self._row(sample, again)
            yield row

    def _fetch(self, samples: list[RawSample | Rejected]) -> Iterator[list[bytes]]:
        return fetch(map(self._extents, samples), self.input, self.output)

    def _extents(self, sample: RawSample | Rejected) -> list[Extent]:
        """The extents that must be read to examine a sample."""
        contents: Iterable[Extent | bytes | None]
        if isinstance(sample, Rejected):
            contents = [sample.extent]
        else:
            contents = sample.fields.values() if self.verify != "none" else ()
        return [content for content in contents if isinstance(content, Extent) and content.object != SPOOL]

    def _contents(self, sample: RawSample, fetched: Iterable[bytes]) -> dict[str, bytes]:
        """The contents of a sample's fields: those that were fetched, and those in memory."""
        remaining, contents = iter(fetched), {}
        for field, content in sample.fields.items():
            data: bytes | None
            if isinstance(content, bytes):
                data = content
            else:
                data = self.spool.recent.get(content.offset) if content.object == SPOOL else next(remaining, None)
            if data is not None:
                contents[field] = data
        return contents

    def _row(self, sample: RawSample, fetched: Iterable[bytes]) -> UnitRow | QuarantineEntry:
        _check_names(sample)
        contents = self._contents(sample, fetched)
        images: dict[str, Examined] = {}
        for field in [field for field in _image_fields(sample) if field in contents]:
            is_main = field == sample.image
            try:
                images[field] = self._examine(field, contents[field], is_main=is_main)
            except UndecodableImage as error:
                return _reject(sample, field, contents[field], str(error) if is_main else f"its {field}: {error}")
        image = images.get(sample.image) or examine(b"", field=sample.image, verify="none", options=self.options)
        stored = stored_field(image.field, self.options) if image.field else ""
        if stored != sample.image and stored in sample.fields:
            reason = f"its image would be stored as {stored}, which it has already"
            return _reject(sample, sample.image, contents.get(sample.image), reason)
        return UnitRow(
            split=sample.split,
            name=sample.name,
            key=sample.key,
            label=int(sample.label),
            fix=image.marks,
            content=Content(
                image=image.field,
                fields=[
                    (stored if field == sample.image else field, self._stored(content, contents.get(field)))
                    for field, content in fields_of(sample)
                ],
            ),
        )

    def _examine(self, field: str, data: bytes, *, is_main: bool) -> Examined:
        options = self.options if is_main else replace(_UNCHANGED, decoded_bytes=self.options.decoded_bytes)
        return examine(data, field=field, verify=self.verify, options=options)

    def _stored(self, content: Extent | bytes, data: bytes | None) -> Extent | bytes:
        """The content as the plan keeps it: with the CRC32C of `data`, or spooled if it is large and in memory."""
        if isinstance(content, Extent) and data is not None:
            content = msgspec.structs.replace(content, crc32c=crc32c_of(data))
        if isinstance(content, bytes) and len(content) > MAX_INLINE_BYTES:
            content = self.spool.add(content)
        if isinstance(content, Extent) and content.object == SPOOL:
            return msgspec.structs.replace(content, object=SPOOLED + paths.spool_path(self.unit))
        return content


def _too_large(sample: RawSample | Rejected) -> Rejected | None:
    """A sample with a field that no tar can hold, as Rejected; its bytes are not read, not even for their hash."""
    if isinstance(sample, Rejected):
        return None
    for field, content in sample.fields.items():
        num_bytes = content.num_bytes if isinstance(content, Extent) else len(content)
        if num_bytes > MAX_MEMBER_BYTES:
            reason = f"its {field} has {num_bytes} bytes, a member of a tar at most {MAX_MEMBER_BYTES}"
            return Rejected(name=sample.name, split=sample.split, reason=reason)
    return None


def _image_fields(sample: RawSample) -> list[str]:
    """The field that is the sample's image, and any others that hold one, in member order."""
    return [field for field in sample.fields if field == sample.image or field.rpartition(".")[2] in FIELD_OF_EXTENSION]


def _reject(sample: RawSample, field: str, data: bytes | None, reason: str) -> QuarantineEntry:
    """The quarantine entry of a sample that is rejected for one of its fields; `data` is None if that was not read."""
    content = sample.fields[field]
    extent = content if data is not None and isinstance(content, Extent) else None
    return _entry(Rejected(name=sample.name, split=sample.split, reason=reason, extent=extent), data or b"")


def _entry(rejected: Rejected, data: bytes) -> QuarantineEntry:
    extent = rejected.extent
    return {
        "name": rejected.name,
        "split": rejected.split,
        "reason": rejected.reason,
        "object": extent.object if extent else None,
        "offset": extent.offset if extent else None,
        "num_bytes": extent.num_bytes if extent else None,
        "sha256": hashlib.sha256(data).hexdigest() if extent else None,
    }


def _check_names(sample: RawSample) -> None:
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
