"""Indexes a unit: finds its samples, examines them, and records the extents of their bytes."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pipelines.config import BuildConfig
from pipelines.holdout import Holdout
from pipelines.images.annotation_geometry import fitted
from pipelines.images.check import MARK_SEPARATOR, examine
from pipelines.images.encode import resized_mask
from pipelines.images.options import ImageOptions, Verify, resized, stored_field
from pipelines.plan import paths, tables
from pipelines.plan.append import Addition, count_known_images, known_samples, relabelled, renamed
from pipelines.plan.files import PlanFiles, decode_record
from pipelines.plan.plan_records import Build
from pipelines.plan.range_reads import SPOOLED, fetch
from pipelines.plan.summaries import KnownCount, UnitSummary, summarize
from pipelines.plan.survey import UnitRef, read_unit
from pipelines.plan.tables import QuarantineEntry, SampleRow
from pipelines.sources.base import SPOOL, Extent, RawSample, Rejected
from shardset.checksum import crc32c_of
from shardset.errors import BadTarget, SourceError, UndecodableImage
from shardset.format import naming
from shardset.format.images import is_image_field
from shardset.format.images.masks import is_mask_field
from shardset.format.images.orientation import upright_size
from shardset.format.labels import MAX_LABEL
from shardset.storage.base import ObjectWriter, Storage
from shardset.storage.checked import read_twice

T = TypeVar("T")

BATCH = 64

MAX_RECENT_BYTES = 16 << 20
"""A batch of samples ends when its contents are so large."""

MAX_INLINE_BYTES = 1024
"""Larger fields go to the unit's spool, smaller ones into the sample's row: planning holds many
rows in memory.
"""


class UnitSpool:
    """Stores bytes that can't be read by range from the input in one object of the plan."""

    def __init__(self, files: PlanFiles, path: str, stack: ExitStack) -> None:
        self.path = path
        self.recent: dict[Extent, bytes] = {}
        """The contents of the current batch that the source has read."""
        self._files, self._stack = files, stack
        self._writer: ObjectWriter | None = None
        self._size = 0

    def add(self, content: bytes) -> Extent:
        """The extent at which `content` will be stored."""
        if self._writer is None:  # most units need no spool
            self._writer = self._stack.enter_context(self._files.writer(self.path))
        self._writer.write(content)
        extent = Extent(SPOOL, "", self._size, len(content), crc32c_of(content))
        self.show(extent, content)
        self._size += len(content)
        return extent

    def show(self, extent: Extent, content: bytes) -> None:
        """Keeps the content of an extent until the batch is examined."""
        self.recent[extent] = content

    def batches(self, samples: Iterable[T]) -> Iterator[list[T]]:
        """The samples in batches whose contents fit into memory."""
        batch: list[T] = []
        for sample in samples:
            batch.append(sample)
            if len(batch) == BATCH or sum(map(len, self.recent.values())) >= MAX_RECENT_BYTES:
                yield batch
                batch = []
                self.recent.clear()
        if batch:
            yield batch


def index_unit(build: Build, unit: UnitRef) -> UnitSummary:
    """Writes a unit's table and summary, unless an earlier attempt of the same build left them;
    returns the summary.

    A label that is no class is bad.
    """
    files = build.files
    summary_path = paths.summary_path(unit.number)
    if content := files.find(summary_path):
        return decode_record(files.output, summary_path, content, UnitSummary)
    rows, rejected, skipped = read_twice(lambda: _read_samples(build, unit))
    return write_new_unit(build, unit.number, rows, rejected, skipped)


def write_new_unit(
    build: Build,
    unit: int,
    rows: Sequence[SampleRow],
    rejected: Sequence[QuarantineEntry],
    skipped: KnownCount,
) -> UnitSummary:
    """Writes a unit; in an append, samples whose keys the set has get others."""
    files, addition = build.files, build.file.appends
    if addition:
        rows = renamed(files, addition, rows)
        skipped.num_images = count_known_images(files, rows)
    return write_unit(files, unit, rows, rejected, skipped)


def write_unit(
    files: PlanFiles,
    unit: int,
    rows: Sequence[SampleRow],
    rejected: Sequence[QuarantineEntry],
    skipped: KnownCount,
) -> UnitSummary:
    """Writes the table of a unit, then its summary, which says that both are there."""
    files.write(paths.unit_path(unit), tables.to_bytes(tables.unit_table(rows, rejected)))
    summary = summarize(unit, rows, rejected, skipped)
    files.write(paths.summary_path(unit), msgspec.json.encode(summary))
    return summary


def fields_of(sample: RawSample) -> list[tuple[str, Extent | bytes]]:
    """The stored fields in member order: the sample's, and its label as `cls`."""
    fields = list(sample.fields.items())
    if sample.label >= 0 and "cls" not in sample.fields:
        after = 1 + [*sample.fields].index(sample.image) if sample.image in sample.fields else 0
        fields.insert(after, ("cls", b"%d" % sample.label))
    return fields


def _read_samples(
    build: Build, ref: UnitRef
) -> tuple[list[SampleRow], list[QuarantineEntry], KnownCount]:
    """A row or a quarantine entry for each sample of a unit, examined; and the number of those that
    are skipped, unread, because the set has their names.
    """
    rows: list[SampleRow] = []
    rejected: list[QuarantineEntry] = []
    skipped, replaced = KnownCount(), set[str]()

    def samples(spool: UnitSpool) -> Iterator[RawSample | Rejected]:
        for sample in build.source.index(read_unit(build.files.output, ref), spool):
            if isinstance(sample, Rejected):
                replaced.add(sample.replaces)
            yield sample

    with ExitStack() as stack:
        spool = UnitSpool(build.files, paths.spool_path(ref.number), stack)
        for row in examined(build, samples(spool), spool, skipped):
            if isinstance(row, SampleRow):
                rows.append(row)
            else:
                rejected.append(row)
    return [row for row in rows if row.name not in replaced], rejected, skipped


def examined(
    build: Build, samples: Iterable[RawSample | Rejected], spool: UnitSpool, skipped: KnownCount
) -> Iterator[SampleRow | QuarantineEntry]:
    """A row or a quarantine entry for each sample, in order, but for those that an append skips,
    which are counted.
    """
    config, files, addition = build.config, build.files, build.file.appends
    labels = addition.labels if addition else ()
    num_classes = MAX_LABEL + 1 if build.num_classes is None else build.num_classes
    holdout = Holdout(config.holdout, config.seed)
    categories = addition.categories if addition else {}
    examiner = _Examiner(config, build.source.input, files.output, spool, holdout, categories)
    for batch in spool.batches(relabelled(sample, labels, num_classes) for sample in samples):
        if addition and addition.known == "skip":
            batch = _new_of(files, addition, batch, skipped)
        yield from examiner.rows(batch)


def _new_of(
    files: PlanFiles,
    addition: Addition,
    batch: Sequence[RawSample | Rejected],
    skipped: KnownCount,
) -> list[RawSample | Rejected]:
    """The samples that the set does not have; the others are counted."""
    splits, new = [*addition.num_source_samples], []
    for sample, stored in zip(batch, known_samples(files, addition, batch), strict=True):
        if stored is None:
            new.append(sample)
        else:
            skipped.skip(sample.name, splits[stored.split], is_same=stored.is_same)
    return new


@dataclass(frozen=True, slots=True)
class _Examiner:
    """Reads the samples of one unit and turns each into a row, or into a quarantine entry."""

    config: BuildConfig
    input: Storage
    output: Storage
    spool: UnitSpool
    holdout: Holdout
    categories: Mapping[int, int]

    def rows(self, batch: Sequence[RawSample | Rejected]) -> Iterator[SampleRow | QuarantineEntry]:
        """A row or a quarantine entry for each sample, in order."""
        for sample, contents in zip(batch, self._read(batch, self.spool.recent), strict=True):
            if isinstance(sample, Rejected):
                yield _entry(sample, sample.reason, sample.extent, contents.get("", b""))
                continue
            row = self._row(sample, contents)
            if not isinstance(row, SampleRow):  # the bytes may be damaged in transfer only
                [again] = self._read([sample], {})
                row = row if again == contents else self._row(sample, again)
            yield row

    def _read(
        self, samples: Sequence[RawSample | Rejected], recent: Mapping[Extent, bytes]
    ) -> Iterator[dict[str, bytes]]:
        """The contents of each sample that are needed to examine it, by field ("" if the sample is
        rejected). Reads from the input what is not `recent`.
        """
        needed = [self._needed(sample) for sample in samples]
        missing = (
            [
                part
                for part in parts.values()
                if isinstance(part, Extent) and part.object != SPOOL and part not in recent
            ]
            for parts in needed
        )
        fetched = fetch(missing, self.input, self.output)
        for parts, contents in zip(needed, fetched, strict=True):
            remaining, by_field = iter(contents), {}
            for field, part in parts.items():
                if isinstance(part, bytes):
                    by_field[field] = part
                elif part in recent or part.object == SPOOL:
                    by_field[field] = self.spool.recent[part]
                else:
                    by_field[field] = next(remaining)
            yield by_field

    def _needed(self, sample: RawSample | Rejected) -> dict[str, Extent | bytes]:
        """What must be known to examine a sample; other fields are not read."""
        if isinstance(sample, Rejected):
            return {"": sample.extent} if sample.extent else {}
        is_read = self._verify(sample) != "none" or self.config.require or self.holdout
        return {
            field: part
            for field, part in sample.fields.items()
            if is_read or isinstance(part, bytes) or part.object == SPOOL
        }

    def _row(self, sample: RawSample, contents: dict[str, bytes]) -> SampleRow | QuarantineEntry:
        _check_names(sample)
        verify, options = self._verify(sample), self.config.image
        if (required := self.config.require) and not contents.get(required, b"").strip():
            return _entry(sample, f"its {required} is missing or empty")
        image, size, small_masks = None, (0, 0), dict[str, bytes]()
        # A mask is compared with the image, so that comes first.
        for field, data in sorted(contents.items(), key=lambda item: item[0] != sample.image):
            is_first = field == sample.image
            if not is_first and not is_image_field(field):
                continue
            # a further image is stored as it is
            field_options = (
                options if is_first else ImageOptions(decoded_bytes=options.decoded_bytes)
            )
            try:
                examined = examine(
                    data, field=field, verify=verify, options=field_options, image_size=size
                )
                small = resized(size, options.resize_shorter)
                if is_mask_field(field) and small != size:
                    small_masks[field] = resized_mask(data, small)
            except UndecodableImage as error:
                reason = str(error) if is_first else f"its {field}: {error}"
                return _entry(sample, reason, sample.fields[field], data)
            if is_first:
                image, size = examined, upright_size(examined.size, examined.orientation)
        image = image or examine(b"", field=sample.image, verify="none", options=options)
        marks, json = [image.marks], contents.get("json", b"")
        if any(image.size):
            try:
                moved, changes = fitted(json, image, options.resize_shorter, self.categories)
            except BadTarget as error:
                return _entry(sample, str(error), sample.fields["json"], json)
            marks += sorted(changes)
            changed = small_masks | ({} if moved is json else {"json": moved})
            if changed:
                sample = msgspec.structs.replace(sample, fields=sample.fields | changed)
        stored = stored_field(image.field, options) if image.field else ""
        if stored != sample.image and stored in sample.fields:
            reason = f"its image would be stored as {stored}, which it has already"
            content = sample.fields[sample.image] if sample.image in contents else None
            return _entry(sample, reason, content, contents.get(sample.image, b""))
        split, draw, number = sample.split, 0, 0
        if self.holdout:
            raw = contents.get(sample.image, b"")
            split, draw, number = self.holdout.place(sample.drawn_by or sample.key, raw)
        return SampleRow(
            split=split,
            draw=draw,
            image_number=number,
            name=sample.name,
            key=sample.key,
            label=int(sample.label),
            fix=MARK_SEPARATOR.join(filter(None, marks)),
            image=image.field,
            fields=[
                (
                    stored if field == sample.image else field,
                    self._stored(content, contents.get(field)),
                )
                for field, content in fields_of(sample)
            ],
        )

    def _verify(self, sample: RawSample) -> Verify:
        """How to check a sample: boxes and masks that may move need the size of their image."""
        moves = self.config.image.resize_shorter or self.categories
        moved = any(field == "json" or is_mask_field(field) for field in sample.fields)
        return "header" if self.config.verify == "none" and moves and moved else self.config.verify

    def _stored(self, content: Extent | bytes, data: bytes | None) -> Extent | bytes:
        """The content as the plan keeps it: an extent with its CRC32C, or the bytes if they are
        few.
        """
        if isinstance(content, Extent) and data is not None:
            content = msgspec.structs.replace(content, crc32c=crc32c_of(data))
        if isinstance(content, bytes) and len(content) > MAX_INLINE_BYTES:
            content = self.spool.add(content)
        if isinstance(content, Extent) and content.object == SPOOL:
            return msgspec.structs.replace(content, object=SPOOLED + self.spool.path)
        return content


def _entry(
    sample: RawSample | Rejected,
    reason: str,
    content: Extent | bytes | None = None,
    data: bytes = b"",
) -> QuarantineEntry:
    """The quarantine entry of a sample; `data` was found at `content`."""
    entry = QuarantineEntry(name=sample.name, split=sample.split, reason=reason)
    if not isinstance(content, Extent):
        return entry
    return msgspec.structs.replace(
        entry,
        object=content.object,
        offset=content.offset,
        num_bytes=content.num_bytes,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _check_names(sample: RawSample) -> None:
    if not naming.is_split(sample.split):
        raise SourceError(
            f"{sample.name}: {sample.split!r} can't name a split (expected {naming.SPLIT_NAMES});"
            " rename it, or move its files into a folder with the name of the split, such as train/"
        )
    for field in sample.fields:
        if not naming.is_field(field):
            raise SourceError(
                f"{sample.name}: field {field!r} can't be an extension; use lower-case letters and"
                " digits"
            )
