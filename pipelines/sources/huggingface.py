"""Parquet files of a Hugging Face image dataset: a column of images (bytes and path), one of
labels, any others.

The survey reads the footers and labels, a thousandth of the bytes. A unit is a run of row groups; a
worker reads its images a few at a time. Checksums of pages are compared where a file has
them, which few have.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
from msgspec.structs import asdict
from pyarrow.parquet import ParquetFile

from pipelines.holdout import REST
from pipelines.sources import objects
from pipelines.sources.base import (
    RawSample,
    Rejected,
    Spool,
    Survey,
    Unit,
    class_infos,
)
from pipelines.sources.formats import parquet
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.record_table import (
    PATHS,
    Columns,
    Label,
    choose_columns,
    class_names,
    compact,
    label_in,
    usual_name,
)
from pipelines.sources.formats.spilled_list import SpilledList
from shardset.errors import SourceError
from shardset.format.labels import NO_LABEL, class_name
from shardset.storage.base import Stat, Storage
from shardset.storage.many import OBJECTS_AT_ONCE, in_order

ROWS_PER_UNIT = 1_000

_IMAGES_AT_ONCE = 16
_LABELS_AT_ONCE = 10_000
_SURVEY_WINDOW = 1 << 16
"""The survey jumps from one label column to the next: a few KiB each."""

_EMBED = (
    "write the data set again by"
    " .with_format('arrow').map(datasets.table.embed_table_storage, batched=True).to_parquet(...)"
)
_SHARD_NAME = re.compile(r"(.+?)-\d{5,}-of-\d{5,}(-[0-9a-f]+)?", re.ASCII)
_SPLIT_WORD = re.compile(
    r"(?<![a-z])(train|training|validation|valid|val|dev|test|testing|eval)(?![a-z])", re.I
)


@dataclass(frozen=True)
class HuggingFace:
    """The rows of all Parquet files below `input`, or of one `file` there.

    `image_column` and `label_column` name the columns, None takes those that types, the schema's
    metadata or usual names tell; a `label_column` of "" means that there are no labels. Other
    columns go into a `json` field, except bytes. A sample is called FILE/ROW, with the path of its
    image if it has one.
    """

    input: Storage
    file: str = ""
    image_column: str | None = None
    label_column: str | None = None
    allow_missing_parts: bool = False
    rows_per_unit: int = ROWS_PER_UNIT

    def survey(self) -> Survey:
        """Reads the labels of all rows; raises SourceError if a file is damaged or unlike the
        others.
        """
        files = self._files()
        if not (self.file or self.allow_missing_parts):
            objects.refuse_missing_parts(self.input, [file.stat.name for file in files])
        all_labels, without_labels = SpilledList(), list[Unit]()
        first_rows, num_rows = dict[Label, str](), Counter[str]()
        table: ImageTable | None = None
        # so that the rows of few files wait in memory
        scanned = in_order(OBJECTS_AT_ONCE, files, lambda file: self._scan(file.stat))
        for file, (columns, row_groups, labels) in zip(files, scanned, strict=True):
            table = table or columns
            if table != columns:
                raise SourceError(
                    f"{self.input.url}/{file.stat.name}: it has {columns!s:.300}, the first file"
                    f" {table!s:.300}; expected files of one dataset: name one file or folder as"
                    " input"
                )
            first_in_split = num_rows[file.split]
            for number, label in enumerate(labels, first_in_split):
                if label not in first_rows:
                    first_rows[label] = f"split {file.split}, row {number}"
                all_labels.add(label)
            num_rows[file.split] += len(labels)
            for unit in _units(row_groups, self.rows_per_unit):
                place = {"object": asdict(file.stat), "split": file.split}
                without_labels.append({**unit, **place, "first_in_split": first_in_split})
        assert table is not None
        names, refusal = [*table.names], ""
        if not names:
            names, refusal = class_names(first_rows, self.input.url)
        numbers: dict[Label, int] = {name: label for label, name in enumerate(names)}
        units, remaining = SpilledList(), iter(all_labels)
        for unit in without_labels:
            rows = islice(remaining, unit["num_rows"])
            units.add({**unit, "labels": [numbers.get(label, label) for label in rows]})
        return Survey(
            units=units,
            classes=class_infos(names),
            splits=num_rows,
            notes=[*table.notes()],
            objects={file.stat.name: file.stat.num_bytes for file in files},
            looked_for=table.columns.looked_for,
            refusal=refusal,
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The rows of a run of row groups, in order, with their images in the spool."""
        stat = Stat(**unit["object"])
        where, split, first_row = f"{self.input.url}/{stat.name}", unit["split"], unit["first_row"]
        with RangeFile(self.input, stat) as file:
            opened = parquet.open_parquet(file, where)
            table = self._table(opened, where)
            columns = [table.columns.path, *table.extra]
            records = parquet.records(
                opened,
                where,
                columns=columns,
                row_groups=range(*unit["row_groups"]),
                batch_size=_IMAGES_AT_ONCE,
            )
            for row, (label, record) in enumerate(
                zip(unit["labels"], records, strict=True), first_row
            ):
                image = record[table.columns.path]
                whole = image if isinstance(image, dict) else {"bytes": image}
                content, path = whole["bytes"], whole.get("path") or ""
                name = f"{stat.name}/{row}/{path}" if path else f"{stat.name}/{row}"
                if not content:
                    lost = f"its image has no bytes, only the path {path}; {_EMBED}"
                    yield Rejected(name=name, split=split, reason=lost if path else "empty")
                    continue
                key = objects.key_of(path) or f"{unit['first_in_split'] + row:07d}"
                extra = {column: parquet.json_value(record[column]) for column in table.extra}
                yield objects.image_sample(
                    name,
                    f"{split}/{key}",
                    split=split,
                    label=label,
                    content=spool.add(content),
                    extra=compact(extra) if extra else "",
                )

    def _files(self) -> list["_File"]:
        """Raises SourceError for files that can't be one data set."""
        listed = self.input.list(self.file)
        files = [_file(stat) for stat in listed if self._is_read(stat.name)]
        if not files:
            raise SourceError(
                f"{self.input.url}: no {self.file or '*.parquet'} there; found"
                f" {objects.first_names(self.input)}; give the folder of Parquet files, or one"
                " file; `to_parquet` of the library datasets writes one"
                + objects.advice_in(self.input, "hf")
            )
        url = self.input.url
        folders = sorted({file.folder for file in files})
        if len(folders) > 1:
            raise SourceError(
                f"{url}: Parquet files of several data sets, in"
                f" {', '.join(folder or '.' for folder in folders[:5])}; name the folder of one as"
                " input"
            )
        return files

    def _is_read(self, name: str) -> bool:
        if self.file:
            return name == self.file
        return objects.extension(name) == "parquet" and not objects.is_hidden(name)

    def _scan(self, stat: Stat) -> tuple["ImageTable", list[int], list[Label]]:
        """The schema of a file, the numbers of rows in its row groups, and the label of each
        row.
        """
        where = f"{self.input.url}/{stat.name}"
        with RangeFile(self.input, stat, _SURVEY_WINDOW) as opened:
            file = parquet.open_parquet(opened, where)
            table, metadata = self._table(file, where), file.metadata
            sizes = [metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
            label = table.columns.label
            if not label:
                return table, sizes, [NO_LABEL] * sum(sizes)
            records = parquet.records(file, where, columns=[label], batch_size=_LABELS_AT_ONCE)
            labels = [
                label_in(record[label], f"{where}: row {row}") for row, record in enumerate(records)
            ]
            return table, sizes, labels

    def _table(self, file: ParquetFile, where: str) -> "ImageTable":
        return image_table(file.schema_arrow, self.image_column, self.label_column, where)


class _File(NamedTuple):
    """A file, the split of its rows, and the folder of its data set."""

    stat: Stat
    split: str
    folder: str


def _units(row_groups: Sequence[int], rows_per_unit: int) -> Iterator[Unit]:
    """Neighbouring row groups of together at least `rows_per_unit` rows."""
    start, first_row, num_rows = 0, 0, 0
    for stop, size in enumerate(row_groups, start=1):
        num_rows += size
        if num_rows >= rows_per_unit or stop == len(row_groups):
            yield {"row_groups": [start, stop], "first_row": first_row, "num_rows": num_rows}
            start, first_row, num_rows = stop, first_row + num_rows, 0


def _file(stat: Stat) -> _File:
    """A file with the split and the folder that its name tells.

    `data/train-00000-of-00002.parquet`, `data/train.parquet` and `data/train/0000.parquet` are
    files of split `train` of the data set `data`.
    """
    folder, _, last = stat.name.rpartition("/")
    stem = objects.without_extension(last)
    if shard := _SHARD_NAME.fullmatch(stem):
        return _File(stat, shard[1], folder)
    parent, _, inner = folder.rpartition("/")
    for text, place in ((stem, folder), (inner, parent)):
        if word := _SPLIT_WORD.search(text):
            return _File(stat, word[0].lower(), place)
    return _File(stat, REST, folder)


@dataclass(frozen=True, slots=True)
class ImageTable:
    """The content of a schema: the columns, any class names, the columns that go into `json`, and
    the rest.
    """

    columns: Columns
    names: tuple[str, ...]
    extra: tuple[str, ...]
    left_out: tuple[str, ...]

    def notes(self) -> Iterator[str]:
        """Sentences on the columns that were taken, and on those that were not."""
        yield from self.columns.notes()
        if self.left_out:
            yield f"left out the columns {', '.join(self.left_out)}, which hold bytes"


def image_table(schema: pa.Schema, image: str | None, label: str | None, where: str) -> ImageTable:
    """The content of a schema; raises SourceError if it has no column of images, or if more than
    one may have the labels.
    """
    features = _features(schema)
    class_labels = [
        name for name, feature in features.items() if feature.get("_type") == "ClassLabel"
    ]
    if label is None and len(class_labels) == 1:
        [label] = class_labels
    columns = choose_columns(schema.names, _image_column(schema, image, where), label, where)
    rest = [name for name in schema.names if name not in (columns.path, columns.label)]
    extra = [name for name in rest if not parquet.holds_bytes(schema.field(name).type)]
    names = features.get(columns.label, {}).get("names")
    return ImageTable(
        columns=columns,
        names=tuple(class_name(str(name)) for name in names) if isinstance(names, list) else (),
        extra=tuple(extra),
        left_out=tuple(name for name in rest if name not in extra),
    )


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """The notes of the library datasets about each column;
    nothing if another program wrote the file.
    """
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _image_column(schema: pa.Schema, wanted: str | None, where: str) -> str:
    images = [name for name in schema.names if _is_image(schema.field(name).type)]
    if not images:
        raise SourceError(
            f"{where}: columns {', '.join(schema.names)}; none holds images (bytes, or bytes and"
            " path); a table of paths is read by --source listing"
        )
    column = wanted or (images[0] if len(images) == 1 else usual_name(images, PATHS))
    if column is None or column not in images:
        advice = f", not in {column}; correct" if column else "; choose one by"
        raise SourceError(
            f"{where}: images are in the columns {', '.join(images)}{advice} --path-column"
        )
    return column


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(each.name == "bytes" and _is_image(each.type) for each in kind)
    return parquet.is_bytes(kind)
