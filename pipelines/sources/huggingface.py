"""Parquet files of a Hugging Face image dataset: a column of images (bytes and path), one of
labels, any others.

The survey reads the footers, labels and paths, a thousandth of the bytes. A unit is a run of row
groups; a worker reads its images a few at a time. Checksums of pages are compared where a file has
them, which few have.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
from msgspec.structs import asdict

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
from pipelines.sources.formats.records import (
    PATHS,
    Columns,
    Label,
    choose_columns,
    class_names,
    compact,
    label_in,
    usual_name,
)
from pipelines.sources.formats.spilled_list import Entry, SpilledList
from shardset.errors import SourceError
from shardset.format.labels import NO_LABEL, class_name
from shardset.read.threads import results_in_order
from shardset.storage.base import Stat, Storage

ROWS_PER_UNIT = 1_000

_IMAGES_AT_ONCE = 16
_LABELS_AT_ONCE = 10_000
_SURVEY_THREADS = 16
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
        """Reads the labels and paths of all rows; raises SourceError if a file is damaged or unlike
        the others.
        """
        files = self._files()
        if not (self.file or self.allow_missing_parts):
            objects.refuse_missing_parts(self.input, [file.stat.name for file in files])
        rows, without_rows = SpilledList(), list[Unit]()
        found, num_rows = dict[Label, str](), Counter[str]()
        table: ImageTable | None = None
        scans = (partial(self._scan, file) for file in files)
        # so that the rows of few files wait in memory
        scanned = results_in_order("hf-survey", _SURVEY_THREADS, scans)
        for file, (own, row_groups, labels_and_paths) in zip(files, scanned, strict=True):
            table = table or own
            if table != own:
                raise SourceError(
                    f"{self.input.url}/{file.stat.name}: it has {own!s:.300}, the first file"
                    f" {table!s:.300}; expected files of one data set: name one file or folder as"
                    " input"
                )
            for number, (label, path) in enumerate(labels_and_paths, num_rows[file.split]):
                if label not in found:
                    found[label] = f"split {file.split}, row {number}"
                rows.add(
                    [label, file.split, f"{file.split}/{objects.key_of(path) or f'{number:07d}'}"]
                )
            num_rows[file.split] += len(labels_and_paths)
            without_rows += _units(file, row_groups, self.rows_per_unit)
        assert table is not None
        names, refusal = list(table.names), ""
        if not names:
            names, refusal = class_names(found, self.input.url)
        labels: dict[Label, int] = {name: label for label, name in enumerate(names)}
        units, remaining = SpilledList(1), iter(rows)
        for unit in without_rows:
            entries = [
                [labels.get(label, label), split, key]
                for label, split, key in islice(remaining, unit["num_rows"])
            ]
            units.add({**unit, "rows": entries})
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
        where = f"{self.input.url}/{stat.name}"
        with RangeFile(self.input, stat) as file:
            opened = parquet.open_parquet(file, where)
            table = ImageTable.of(opened.schema_arrow, self.image_column, self.label_column, where)
            columns, row_groups = [table.columns.path, *table.extra], range(*unit["row_groups"])
            records = parquet.records(
                opened, where, columns=columns, row_groups=row_groups, batch_size=_IMAGES_AT_ONCE
            )
            for number, (row, record) in enumerate(
                zip(unit["rows"], records, strict=True), unit["first_row"]
            ):
                yield _sample(f"{stat.name}/{number}", row, table, record, spool)

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

    def _scan(self, file: "_File") -> tuple["ImageTable", list[int], list[Entry]]:
        """The schema of a file, the numbers of rows in its row groups, and the label and path of
        each row.
        """
        where = f"{self.input.url}/{file.stat.name}"
        with RangeFile(self.input, file.stat, _SURVEY_WINDOW) as opened:
            footer = parquet.open_parquet(opened, where)
            table = ImageTable.of(footer.schema_arrow, self.image_column, self.label_column, where)
            metadata = footer.metadata
            sizes = [metadata.row_group(n).num_rows for n in range(footer.num_row_groups)]
            if not table.leaves:
                return table, sizes, [[NO_LABEL, ""]] * sum(sizes)
            records = parquet.records(
                footer, where, columns=table.leaves, batch_size=_LABELS_AT_ONCE
            )
            rows = [
                table.label_and_path(record, f"{where}: row {number}")
                for number, record in enumerate(records)
            ]
            return table, sizes, rows


class _File(NamedTuple):
    """A file, the split of its rows, and the folder of its data set."""

    stat: Stat
    split: str
    folder: str


def _sample(
    name: str,
    row: Entry,
    table: "ImageTable",
    record: dict[str, Any],
    spool: Spool,
) -> RawSample | Rejected:
    label, split, key = row
    image = record[table.columns.path]
    whole = image if isinstance(image, dict) else {"bytes": image}
    content, path = whole["bytes"], whole.get("path")
    name = f"{name}/{path}" if path else name
    if not content:
        reason = f"its image has no bytes, only the path {path}; {_EMBED}" if path else "empty"
        return Rejected(name=name, split=split, reason=reason)
    extra = {column: parquet.json_value(record[column]) for column in table.extra}
    return objects.image_sample(
        name,
        key,
        split=split,
        label=label,
        content=spool.add(content),
        extra=compact(extra) if extra else "",
    )


def _units(file: _File, row_groups: Sequence[int], rows_per_unit: int) -> Iterator[Unit]:
    """Neighbouring row groups of together at least `rows_per_unit` rows."""
    start, first_row, num_rows = 0, 0, 0
    for number, size in enumerate(row_groups, start=1):
        num_rows += size
        if num_rows >= rows_per_unit or number == len(row_groups):
            yield {
                "object": asdict(file.stat),
                "row_groups": [start, number],
                "first_row": first_row,
                "num_rows": num_rows,
            }
            start, first_row, num_rows = number, first_row + num_rows, 0


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
    has_paths: bool
    extra: tuple[str, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(
        cls, schema: pa.Schema, image: str | None, label: str | None, where: str
    ) -> "ImageTable":
        """Raises SourceError if there is no column of images, or no telling which one has the
        labels.
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
        image_type = schema.field(columns.path).type
        return cls(
            columns=columns,
            names=tuple(class_name(str(name)) for name in names) if isinstance(names, list) else (),
            has_paths=pa.types.is_struct(image_type)
            and any(each.name == "path" for each in image_type),
            extra=tuple(extra),
            left_out=tuple(name for name in rest if name not in extra),
        )

    @property
    def leaves(self) -> list[str]:
        """The columns that the survey reads."""
        paths = [f"{self.columns.path}.path"] if self.has_paths else []
        return [self.columns.label, *paths] if self.columns.label else paths

    def label_and_path(self, record: dict[str, Any], where: str) -> list[Any]:
        """The label of a row, NO_LABEL if it has none, and the path of its image, "" if it has
        none.
        """
        label = record.get(self.columns.label)
        path = (record.get(self.columns.path) or {}).get("path") if self.has_paths else None
        return [label_in(label, where), path or ""]

    def notes(self) -> Iterator[str]:
        """Sentences on the columns that were taken, and on those that were not."""
        yield from self.columns.notes()
        if self.left_out:
            yield f"left out the columns {', '.join(self.left_out)}, which hold bytes"


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
    if not column or column not in images:
        raise SourceError(
            f"{where}: images are in the columns {', '.join(images)}"
            + (
                f", not in {column}; correct --path-column"
                if column
                else "; choose one by --path-column"
            )
        )
    return column


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(each.name == "bytes" and _is_image(each.type) for each in kind)
    return parquet.is_bytes(kind)
