"""Indexes a unit: finds its samples, examines them, and records the extents of their bytes."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from pipelines.config import BuildConfig
from pipelines.holdout import Holdout
from pipelines.images.annotations import fitted
from pipelines.images.check import MARK_SEPARATOR, examine
from pipelines.images.encode import resized_mask
from pipelines.images.options import ImageOptions, Verify, resized, stored_field
from pipelines.plan import paths, tables
from pipelines.plan.append import Addition, count_known_images, known, relabelled, renamed
from pipelines.plan.files import PlanFiles, decode_record
from pipelines.plan.range_reads import SPOOLED, fetch
from pipelines.plan.summaries import KnownCount, UnitSummary, summarize
from pipelines.plan.survey import UnitRef, read_unit
from pipelines.plan.tables import Content, QuarantineEntry, UnitRow
from pipelines.sources.base import SPOOL, Extent, RawSample, Rejected, Source
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


def index_unit(
    files: PlanFiles,
    source: Source,
    config: BuildConfig,
    unit: UnitRef,
    addition: Addition | None = None,
    num_classes: int = MAX_LABEL + 1,
) -> UnitSummary:
    """Writes a unit's table and summary, unless an earlier attempt of the same build left them;
    returns the summary.

    A label from `num_classes` on is bad, or one that the input of an addition has no class for.
    """
    summary_path = paths.summary_path(unit.number)
    if content := files.find(summary_path):
        return decode_record(files.output, summary_path, content, UnitSummary)
    read = partial(_read_samples, files, source, config, unit, addition, num_classes)
    rows, rejected, skipped = read_twice(read)
    if addition:
        rows = renamed(files, addition, rows)
        skipped.num_images = count_known_images(files, rows)
    return write_unit(files, unit.number, rows, rejected, skipped)


def write_unit(
    files: PlanFiles,
    unit: int,
    rows: Sequence[UnitRow],
    rejected: Sequence[QuarantineEntry],
    skipped: KnownCount,
) -> UnitSummary:
    """Writes the table of a unit, then its summary, which says that both are there."""
    files.write(paths.unit_path(unit), tables.unit_to_bytes(tables.unit_table(rows, rejected)))
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
    files: PlanFiles,
    source: Source,
    config: BuildConfig,
    ref: UnitRef,
    addition: Addition | None,
    num_classes: int,
) -> tuple[list[UnitRow], list[QuarantineEntry], KnownCount]:
    """A row or a quarantine entry for each sample of a unit, examined; and the number of those that
    are skipped, unread, because the set has their names.
    """
    rows: list[UnitRow] = []
    rejected: list[QuarantineEntry] = []
    skipped, replaced = KnownCount(), set[str]()
    labels = addition.labels if addition else ()
    with ExitStack() as stack:
        spool = UnitSpool(files, paths.spool_path(ref.number), stack)
        holdout = Holdout(config.holdout, config.seed)
        categories = addition.categories if addition else {}
        examiner = _Examiner(config, source.input, files.output, spool, holdout, categories)
        samples = (
            relabelled(sample, labels, num_classes)
            for sample in source.index(read_unit(files.output, ref), spool)
        )
        for batch in spool.batches(samples):
            replaced.update(one.replaces for one in batch if isinstance(one, Rejected))
            if addition and addition.known == "skip":
                batch = _new_of(files, addition, batch, skipped)
            for row in examiner.rows(batch):
                if isinstance(row, UnitRow):
                    rows.append(row)
                else:
                    rejected.append(row)
    return [row for row in rows if row.name not in replaced], rejected, skipped


def _new_of(
    files: PlanFiles,
    addition: Addition,
    batch: Sequence[RawSample | Rejected],
    skipped: KnownCount,
) -> list[RawSample | Rejected]:
    """The samples that the set does not have; the others are counted."""
    splits, new = [*addition.num_source_samples], []
    for sample, found in zip(batch, known(files, addition, batch), strict=True):
        if found is None:
            new.append(sample)
        else:
            skipped.skip(sample.name, splits[found.split], is_same=found.is_same)
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

    def rows(self, batch: Sequence[RawSample | Rejected]) -> Iterator[UnitRow | QuarantineEntry]:
        """A row or a quarantine entry for each sample, in order."""
        for sample, contents in zip(batch, self._fetch(batch, self.spool.recent), strict=True):
            if isinstance(sample, Rejected):
                yield _entry(sample, contents[0] if contents else b"")
                continue
            row = self._row(sample, contents)
            # reads again: the bytes may be damaged in transfer only
            if not isinstance(row, UnitRow) and contents:
                [again] = self._fetch([sample], {})
                row = row if again == contents else self._row(sample, again)
            yield row

    def _fetch(
        self, samples: Sequence[RawSample | Rejected], recent: Mapping[Extent, bytes]
    ) -> Iterator[list[bytes]]:
        """The contents of the extents of each sample; reads those that are not `recent`."""
        wanted = [self._extents(sample) for sample in samples]
        missing = ([extent for extent in extents if extent not in recent] for extents in wanted)
        fetched = fetch(missing, self.input, self.output)
        for extents, contents in zip(wanted, fetched, strict=True):
            remaining = iter(contents)
            yield [recent[extent] if extent in recent else next(remaining) for extent in extents]

    def _extents(self, sample: RawSample | Rejected) -> list[Extent]:
        """The extents that must be read to examine a sample."""
        contents: Iterable[Extent | bytes | None]
        if isinstance(sample, Rejected):
            contents = [sample.extent]
        else:
            is_read = self._verify(sample) != "none" or self.config.require or self.holdout
            contents = sample.fields.values() if is_read else ()
        return [
            content
            for content in contents
            if isinstance(content, Extent) and content.object != SPOOL
        ]

    def _contents(self, sample: RawSample, fetched: Iterable[bytes]) -> dict[str, bytes]:
        """The contents of a sample's fields: the fetched ones, and those in memory."""
        remaining, contents = iter(fetched), {}
        for field, content in sample.fields.items():
            data: bytes | None
            if isinstance(content, bytes):
                data = content
            elif content.object == SPOOL:
                data = self.spool.recent.get(content)
            else:
                data = next(remaining, None)
            if data is not None:
                contents[field] = data
        return contents

    def _row(self, sample: RawSample, fetched: Iterable[bytes]) -> UnitRow | QuarantineEntry:
        _check_names(sample)
        contents, verify, options = (
            self._contents(sample, fetched),
            self._verify(sample),
            self.config.image,
        )
        if (required := self.config.require) and not contents.get(required, b"").strip():
            reason = f"its {required} is missing or empty"
            return _entry(Rejected(name=sample.name, split=sample.split, reason=reason), b"")
        image, size, small_masks = None, (0, 0), dict[str, bytes]()
        # A mask is compared with the image, so that comes first.
        for field, data in sorted(contents.items(), key=lambda item: item[0] != sample.image):
            is_first = field == sample.image
            if not is_first and not is_image_field(field):
                continue
            # a further image is stored as it is
            own = options if is_first else ImageOptions(decoded_bytes=options.decoded_bytes)
            try:
                examined = examine(data, field=field, verify=verify, options=own, image_size=size)
                small = resized(size, options.resize_shorter)
                if is_mask_field(field) and small != size:
                    small_masks[field] = resized_mask(data, small)
            except UndecodableImage as error:
                return _reject(
                    sample, field, data, str(error) if is_first else f"its {field}: {error}"
                )
            if is_first:
                image, size = examined, upright_size(examined.size, examined.orientation)
        image = image or examine(b"", field=sample.image, verify="none", options=options)
        marks, json = [image.marks], contents.get("json", b"")
        if any(image.size):
            try:
                moved, changes = fitted(json, image, options.resize_shorter, self.categories)
            except BadTarget as error:
                return _reject(sample, "json", json, str(error))
            marks += sorted(changes)
            changed = small_masks | ({} if moved is json else {"json": moved})
            if changed:
                sample = msgspec.structs.replace(sample, fields=sample.fields | changed)
        stored = stored_field(image.field, options) if image.field else ""
        if stored != sample.image and stored in sample.fields:
            reason = f"its image would be stored as {stored}, which it has already"
            return _reject(sample, sample.image, contents.get(sample.image), reason)
        split, draw, number = sample.split, 0, 0
        if self.holdout:
            raw = contents.get(sample.image, b"")
            split, draw, number = self.holdout.place(sample.drawn_by or sample.key, raw)
        return UnitRow(
            split=split,
            draw=draw,
            image=number,
            name=sample.name,
            key=sample.key,
            label=int(sample.label),
            fix=MARK_SEPARATOR.join(filter(None, marks)),
            content=Content(
                image=image.field,
                fields=[
                    (
                        stored if field == sample.image else field,
                        self._stored(content, contents.get(field)),
                    )
                    for field, content in fields_of(sample)
                ],
            ),
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


def _reject(sample: RawSample, field: str, data: bytes | None, reason: str) -> QuarantineEntry:
    """The quarantine entry of a sample with a bad field;
    `data` is None if the field was not read.
    """
    content = sample.fields[field]
    extent = content if data is not None and isinstance(content, Extent) else None
    return _entry(
        Rejected(name=sample.name, split=sample.split, reason=reason, extent=extent), data or b""
    )


def _entry(rejected: Rejected, data: bytes) -> QuarantineEntry:
    extent = rejected.extent
    entry = QuarantineEntry(name=rejected.name, split=rejected.split, reason=rejected.reason)
    if extent is None:
        return entry
    return msgspec.structs.replace(
        entry,
        object=extent.object,
        offset=extent.offset,
        num_bytes=extent.num_bytes,
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
