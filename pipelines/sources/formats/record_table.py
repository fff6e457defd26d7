"""Tables as records: CSV, TSV, JSONL and Parquet files, read row by row; errors name the line."""

import codecs
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any, NamedTuple

import msgspec

from pipelines.sources.formats import parquet
from pipelines.sources.objects import extension
from shardset.errors import SourceError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.labels import MAX_LABEL, NO_LABEL, class_name, plain_label, why_sparse
from shardset.prepared import JSON_ERRORS

ROWS_PER_BATCH = 1_000
DELIMITERS = ",;\t"

Record = dict[str, Any]
"""The values of a row by column."""


MAX_CELL_CHARS = 1 << 20


class RecordTable(NamedTuple):
    """The rows of a table with the position of each, such as `line 7`, and its columns with where
    they are listed.
    """

    names: list[str]
    header: str
    rows: Iterator[tuple[str, Record]]


def _read_csv(file: IO[bytes], where: str) -> RecordTable:
    lines = _lines(file, where)
    first = next(lines, "")
    # As the header has it: spreadsheets write semicolons where the comma is the decimal mark.
    delimiter = next((mark for mark in DELIMITERS if mark in first), ",")
    rows = _csv_rows(chain([first], lines), delimiter, where)
    names = [name.strip() for name in next(rows, (0, [""]))[1]]
    if len({*names}) < len(names) or "" in names:
        raise SourceError(
            f"{where}: line 1: columns {', '.join(names)}; expected a header with path and label,"
            " optional split and key, and no name twice or empty (pandas leaves out its index by"
            " to_csv(index=False))"
        )
    return RecordTable(names, "line 1", _csv_records(rows, names, where, delimiter))


def _lines(file: IO[bytes], where: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{where}: line {number}: not UTF-8 ({error.reason}); save the listing as UTF-8"
            ) from error
        yield text


def _csv_rows(lines: Iterable[str], delimiter: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row, with the number of its last line."""
    row_lines: list[str] = []

    def keep(line: str) -> str:
        row_lines.append(line)
        return line

    csv.field_size_limit(MAX_CELL_CHARS)  # else an eighth of that
    reader = csv.reader(map(keep, lines), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            num_lines, last = len(row_lines), reader.line_num
            if num_lines > 1 and all(_is_row(line, delimiter, len(cells)) for line in row_lines):
                raise SourceError(
                    f"{where}: lines {last - num_lines + 1} to {last} are one row by their quotes"
                    f" and {num_lines} rows without; save the table as JSONL or Parquet, where a"
                    " quote is a quote"
                )
            row_lines.clear()
            yield last, cells
    except csv.Error as error:
        advice = "correct the line, or leave out columns of long texts"
        raise SourceError(
            f"{where}: line {reader.line_num}: not CSV ({error}); {advice}"
        ) from error


def _is_row(line: str, delimiter: str, num_cells: int) -> bool:
    """Whether a line without its quotes is a row, with the name of an image."""
    cells = line.strip("\r\n").split(delimiter)
    return len(cells) == num_cells and not FIELD_OF_EXTENSION.keys().isdisjoint(
        map(extension, cells)
    )


def _csv_records(
    rows: Iterator[tuple[int, list[str]]], header: list[str], where: str, delimiter: str
) -> Iterator[tuple[str, Record]]:
    for line, cells in rows:
        if len(cells) not in (0, len(header)):
            raise SourceError(
                f"{where}: line {line}: {len(cells)} cells, expected {len(header)} as in the"
                f" header; does a cell with {delimiter!r} in it lack quotes?"
            )
        if cells:
            yield f"line {line}", dict(zip(header, cells, strict=True))


def _read_jsonl(file: IO[bytes], where: str) -> RecordTable:
    rows = _jsonl_rows(file, where)
    first = next(rows, None)
    if first is None:
        raise SourceError(f"{where}: no rows, expected one for each image")
    position, record = first
    return RecordTable([*record], position, chain([first], rows))


def _jsonl_rows(file: IO[bytes], where: str) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(codecs.BOM_UTF8).strip()
        try:
            record = msgspec.json.decode(text, type=Record) if text else None
        except JSON_ERRORS as error:
            raise SourceError(
                f"{where}: line {number}: not a JSON object with path and label ({error}); correct"
                " the line"
            ) from error
        if record is not None:
            yield f"line {number}", record


def _read_parquet(file: IO[bytes], where: str) -> RecordTable:
    table = parquet.open_parquet(file, where)
    schema = table.schema_arrow
    # the index of a pandas frame
    names = [name for name in schema.names if not name.startswith("__index_level_")]
    if images := [name for name in names if parquet.holds_bytes(schema.field(name).type)]:
        raise SourceError(
            f"{where}: column {images[0]} holds bytes; read images in a table by --source hf, and"
            " leave other bytes out"
        )
    records = parquet.records(table, where, columns=names, batch_size=ROWS_PER_BATCH)
    rows = (
        (f"row {number}", {name: parquet.json_value(record[name]) for name in names})
        for number, record in enumerate(records, start=1)
    )
    return RecordTable(names, "the schema", rows)


def compact(value: Any) -> str:
    """A value as JSON, the same for equal values."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


READERS: dict[str, Callable[[IO[bytes], str], RecordTable]] = {
    "csv": _read_csv,
    "jsonl": _read_jsonl,
    "ndjson": _read_jsonl,
    "tsv": _read_csv,
    "parquet": _read_parquet,
}
"""By extension of the file."""


# Which columns hold the images and their labels: those that the user names, or those with usual
# names.

PATHS = (
    "path",
    "image",
    "file",
    "filename",
    "filepath",
    "file_name",
    "file_path",
    "image_path",
    "img",
)
LABELS = ("label", "class", "category", "target", "class_name", "label_name")
"""The usual names, in any case; the first one in these orders counts."""

Label = int | str
"""The number or the name of a class, or NO_LABEL."""

OTHERS = ("split", "key")
"""Columns with a special meaning."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table; `label` is "" if its images have no labels."""

    path: str
    label: str

    def notes(self) -> Iterator[str]:
        """A sentence on what was taken, unless it is `path` and `label`."""
        if (self.path, self.label) == (PATHS[0], LABELS[0]):
            return
        label = f"the labels from {self.label!r}" if self.label else "no labels"
        yield (
            f"took the images from column {self.path!r} and {label}; --path-column and"
            " --label-column name others"
        )

    @property
    def looked_for(self) -> str:
        """Where labels are expected, in words."""
        return (
            f"numbers and names in column {self.label!r}"
            if self.label
            else f"a column {LABELS[0]!r}"
        )


def choose_columns(
    names: Sequence[str], path: str | None, label: str | None, where: str
) -> Columns:
    """The columns that were asked for by `path` and `label`, or else those with usual names; no
    label is "".

    A table without any further column has no labels. Raises SourceError, which begins with `where`
    and lists the columns, if one that was asked for is missing or none has a usual name.
    """

    def refused(what: str) -> SourceError:
        return SourceError(f"{where}: columns {', '.join(names) or '(none)'}; {what}")

    for flag, name in (("--path-column", path), ("--label-column", label)):
        if name and name not in names:
            raise refused(f"none is called {name!r}; correct {flag}")
    free = [name for name in names if name not in OTHERS]
    path = path or usual_name(free, PATHS)
    if not path:
        raise refused(
            "expected a header with path and label, optional split and key; name them by"
            " --path-column and --label-column"
        )
    free = [name for name in free if name != path]
    if label is None:
        label = usual_name(free, LABELS)
    if label is None and free:
        raise refused(
            "none is called label; name the one with the classes by --label-column, or give"
            " --label-column '' for images without labels"
        )
    return Columns(path, label or "")


def label_in(value: Any, where: str) -> Label:
    """The label in a cell: a number, a name, or NO_LABEL for null, NaN, an empty text and -1.

    Raises SourceError for all else, which begins with `where`.
    """
    # most are, and this is done for each row
    if type(value) is int and NO_LABEL <= value <= MAX_LABEL:
        return value
    if isinstance(value, str):
        value = value.strip()
    number = NO_LABEL if value in (None, "") or value != value else plain_label(value)
    if number is None and isinstance(value, str):
        return class_name(value)
    if number is None or not NO_LABEL <= number <= MAX_LABEL:
        raise SourceError(
            f"{where}: label {value!s:.40}, expected a number from 0 to {MAX_LABEL}, or a name; let"
            " a name begin with a letter"
        )
    return number


def class_names(rows: Mapping[Label, str], where: str) -> tuple[list[str], str]:
    """The names of the classes in the order of their labels, and why a new set can't have them,
    or "".

    `rows` has the first row of each label. Raises SourceError if some are numbers and some are
    names.
    """
    names = [label for label in rows if isinstance(label, str)]
    numbers = [label for label in rows if isinstance(label, int) and label != NO_LABEL]
    if names and numbers:
        number, name = numbers[0], names[0]
        raise SourceError(
            f"{where}: label {number} in {rows[number]} is a number and {name!r} in {rows[name]} a"
            " name, expected all numbers or all names; let each name begin with a letter"
        )
    largest = max(numbers, default=NO_LABEL)
    why = why_sparse(largest, len(numbers))
    return (
        sorted(names) or [str(label) for label in range(largest + 1)],
        why and f"{where}: {rows[largest]}: {why}",
    )


def usual_name(names: Iterable[str], usual: Sequence[str]) -> str | None:
    """The name among `names` that comes first among the usual ones, in any case; None if there is
    none.
    """
    by_usual = {name.strip().casefold(): name for name in reversed([*names])}
    return next((by_usual[name] for name in usual if name in by_usual), None)
