"""A CSV or JSONL file that lists images: `path`, `label`, optional `split` and `key`; other columns go into `json`."""

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any, ClassVar, NoReturn

from pipelines.sources.base import Extent, RawSample, Rejected, Spool, Survey, Unit
from pipelines.sources.classes import class_infos, missing_notes
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.spilled_list import Entry, SpilledList, SpilledUnits
from pipelines.sources.holdout import Holdout, NamesBelow
from pipelines.sources.paths import UNKNOWN_FIELD, extension, without_extension
from shardset.errors import ConfigError, NotFound, SourceError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.naming import is_split
from shardset.storage.base import Stat, Storage
from shardset.storage.open import is_absolute, open_file

ENTRIES_PER_UNIT = 10_000
MAX_LABEL = 1_000_000
MAX_LINE_BYTES = 1 << 20

_STAT_THREADS = 32
_ROWS_AT_ONCE = 10_000
_COLUMNS = ("path", "label", "split", "key")
_NUMBER = re.compile(r"([+-]?[0-9]+)(\.0+)?", re.ASCII)
"""Whole numbers, also as pandas writes them (`7.0`) in a column with a missing one."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Row:
    """One checked row: `label` is a number or a name, `key` may be empty, `extra` has the other columns as JSON."""

    line: int
    path: str
    label: int | str
    split: str
    key: str
    extra: str


@dataclass(slots=True)
class _Listed:
    """All rows (path, label, split, key, extra), and the first row with each type of label."""

    rows: SpilledList = field(default_factory=SpilledList)
    first: dict[type, _Row] = field(default_factory=dict)
    labels: set[int | str] = field(default_factory=set)
    has_extra: bool = False

    def add(self, row: _Row) -> None:
        self.rows.add([row.path, row.label, row.split, row.key, row.extra])
        self.first.setdefault(type(row.label), row)
        self.labels.add(row.label)
        self.has_extra = self.has_extra or bool(row.extra)


@dataclass(frozen=True)
class Listing:
    """The images that `file` in the folder `input` lists, one per row; errors name the line, counted from 1.

    A path is relative to `input`, absolute, or a gs:// URL. Labels are either all numbers, taken as they are, or all
    names, numbered in sorted order. In CSV a label of digits (`7`, `7.0`) is a number, and white space around it is
    ignored; in JSONL its type decides. `holdout` is for listings without splits; it goes by `key` or, without one, by
    the image's name below `input`, without its extension. With `within_input` an image outside of `input`, by an
    absolute path or a symbolic link, is a SourceError. Raises ConfigError if `file` is neither .csv nor .jsonl.
    """

    input: Storage
    file: str
    holdout: Holdout = field(default_factory=Holdout)
    within_input: bool = False
    entries_per_unit: int = ENTRIES_PER_UNIT

    name: ClassVar[str] = "listing"

    def __post_init__(self) -> None:
        if extension(self.file) not in _READERS:
            raise ConfigError(
                f"{self.file}: expected a listing that ends with {', '.join(f'.{end}' for end in _READERS)}"
            )

    def survey(self) -> Survey:
        """Reads the listing and asks the storage for each image's size and generation, 32 at a time.

        Raises SourceError for a row that is not what is expected. A missing image is no error here: `index` rejects it.
        """
        listing = self._stat_listing()
        listed = _Listed()
        for row in self._rows(RangeFile(self.input, self.file, listing.generation, listing.num_bytes)):
            listed.add(row)
        names = self._class_names(listed)
        entries, seen = SpilledList(), set()
        for entry in self._entries(listed, {name: label for label, name in enumerate(names)}):
            entries.add(entry)
            seen.add((entry[4], entry[3]))
        return Survey(
            units=SpilledUnits(entries, self.entries_per_unit, lambda _, some: {"entries": some}),
            classes=class_infos(names),
            notes=[*self.holdout.empty_notes({split for split, _ in seen}), *missing_notes(seen, names)],
            objects={self.file: listing.num_bytes},
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """One sample for each row, pinned to the generation that the survey saw. Rejects a missing image."""
        for path, num_bytes, generation, label, split, key, extra in unit["entries"]:
            if generation is None:
                yield Rejected(name=path, split=split, reason="not found")
                continue
            image = FIELD_OF_EXTENSION.get(extension(path), UNKNOWN_FIELD)
            fields: dict[str, Extent | bytes] = {image: Extent(path, generation, 0, num_bytes)}
            if extra:
                fields["json"] = extra.encode()
            yield RawSample(name=path, key=key, split=split, label=label, image=image, fields=fields)

    def _stat_listing(self) -> Stat:
        try:
            return self.input.stat(self.file)
        except NotFound as error:
            raise SourceError(f"{self._where}: no such listing; name a .csv or .jsonl file as input") from error

    @property
    def _where(self) -> str:
        return f"{self.input.url}/{self.file}"

    def _rows(self, file: IO[bytes]) -> Iterator[_Row]:
        for line, record in _READERS[extension(self.file)](_lines(file, self._where), self._where):
            where = f"{self._where}: line {line}"
            row = _row(line, record, where)
            if self.holdout and row.split:
                raise ConfigError(f"{where}: --holdout with a listing that has splits; leave one of the two out")
            if self.within_input and not _is_within(self.input, row.path):
                raise SourceError(
                    f"{where}: path {row.path!r:.200} leads out of {self.input.url}; move the image there, or leave "
                    "--within-input out"
                )
            yield row

    def _class_names(self, listed: "_Listed") -> list[str]:
        first = listed.first
        if not first:
            raise SourceError(f"{self._where}: no rows, expected one for each image")
        if len(first) > 1:
            number, name = first[int], first[str]
            raise SourceError(
                f"{self._where}: label {number.label} in line {number.line} is a number and {name.label!r} in line "
                f"{name.line} a name, expected all numbers or all names"
            )
        if int in first:
            return [str(label) for label in range(max(int(label) for label in listed.labels) + 1)]
        return sorted(str(label) for label in listed.labels)

    def _entries(self, listed: "_Listed", labels: dict[str, int]) -> Iterator[Entry]:
        empty = "{}" if listed.has_extra else ""
        rows, below = iter(listed.rows), NamesBelow(self.input)
        with ThreadPoolExecutor(_STAT_THREADS) as threads:
            while some := list(islice(rows, _ROWS_AT_ONCE)):
                stats = threads.map(self._stat, [path for path, *_ in some])
                for (path, label, split, key, extra), stat in zip(some, stats, strict=True):
                    yield [
                        path,
                        stat.num_bytes if stat else 0,
                        stat.generation if stat else None,
                        labels[str(label)],
                        split or self._split_of(path, key, below),
                        key or _key_of(path),
                        extra or empty,
                    ]

    def _split_of(self, path: str, key: str, below: NamesBelow) -> str:
        """The split of a row without one, wherever the listing is and however its paths are spelled."""
        if self.holdout and not key and is_absolute(path):
            key = _key_of(below.name(path))
        return self.holdout.split_of(key or _key_of(path))

    def _stat(self, path: str) -> Stat | None:
        storage, name = open_file(path) if is_absolute(path) else (self.input, path)
        try:
            return storage.stat(name)
        except NotFound:
            return None


def _lines(file: IO[bytes], where: str) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise SourceError(f"{where}: line {number} has more than {MAX_LINE_BYTES} bytes; is this a listing?")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{where}: line {number}: not UTF-8 ({error.reason}); save the listing as UTF-8"
            ) from error
        yield text


def _read_csv(lines: Iterable[str], where: str) -> Iterator[tuple[int, Record]]:
    reader = csv.reader(lines, strict=True)
    try:
        header = _check_header(next(reader, []), where)
        for cells in reader:
            if len(cells) not in (0, len(header)):
                raise SourceError(
                    f"{where}: line {reader.line_num}: {len(cells)} cells, expected {len(header)} as in the header; is "
                    "a comma in a cell without quotes?"
                )
            if cells:
                yield reader.line_num, _with_number(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise SourceError(f"{where}: line {reader.line_num}: not CSV ({error}); correct the line") from error


def _check_header(header: list[str], where: str) -> list[str]:
    names = [name.strip() for name in header]
    if not {"path", "label"} <= set(names) or len(set(names)) != len(names) or "" in names:
        raise SourceError(
            f"{where}: line 1: columns {', '.join(names) or '(none)'}; expected a header with path and label, optional "
            "split and key, and no name twice or empty"
        )
    return names


def _with_number(record: Record) -> Record:
    label = record["label"].strip()
    number = _NUMBER.fullmatch(label)
    return {**record, "label": int(number[1][:20]) if number else label}


def _read_jsonl(lines: Iterable[str], where: str) -> Iterator[tuple[int, Record]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
            _compact(record).encode()  # a lone surrogate, which JSON can spell, raises here
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{where}: line {number}: not JSON ({error}); correct the line") from error
        if not isinstance(record, dict):
            raise SourceError(
                f"{where}: line {number}: a {type(record).__name__}, expected an object with path and label"
            )
        yield number, record


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Record:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("an object has a name twice")
    return record


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


_READERS = {"csv": _read_csv, "jsonl": _read_jsonl, "ndjson": _read_jsonl}


def _row(line: int, record: Record, where: str) -> _Row:
    path = _check_path(_text(record, "path", where), where)
    split, key = _text(record, "split", where), _text(record, "key", where)
    if split and not is_split(split):
        raise SourceError(f"{where}: split {split!r}, expected at most 40 letters, digits, - and _, not plan")
    extra = {name: value for name, value in record.items() if name not in _COLUMNS}
    return _Row(
        line=line,
        path=path,
        label=_check_label(record.get("label"), where),
        split=split,
        key=key,
        extra=_compact(extra) if extra else "",
    )


def _key_of(path: str) -> str:
    """The key of an image that is listed without one: its path or URL, without its extension."""
    return without_extension(path.partition("://")[2] or path).lstrip("/")


def _text(record: Record, column: str, where: str) -> str:
    value = record.get(column)
    if value is not None and not isinstance(value, str):
        raise SourceError(f"{where}: {column} is {str(value)[:40]}, expected a text")
    return value or ""


def _check_label(label: Any, where: str) -> int | str:
    if isinstance(label, bool) or not isinstance(label, int | str) or label == "":
        raise SourceError(f"{where}: label {label!r:.40}, expected a number or a name")
    if isinstance(label, int) and not 0 <= label <= MAX_LABEL:
        raise SourceError(
            f"{where}: label {label}, expected 0 to {MAX_LABEL}; is it a name? let it begin with a letter"
        )
    return label


def _check_path(path: str, where: str) -> str:
    if not path or "\0" in path or path.endswith("/"):
        raise SourceError(f"{where}: path {path!r:.80}, expected that of an image")
    if is_absolute(path):
        return _check_absolute(path, where)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise SourceError(
            f"{where}: path {path!r:.80} climbs out of the listing's folder; write it as an absolute path"
        )
    return "/".join(parts)


def _check_absolute(path: str, where: str) -> str:
    try:
        open_file(path)
    except ConfigError as error:
        raise SourceError(f"{where}: {error}") from error
    return path


def _is_within(folder: Storage, path: str) -> bool:
    """Whether the file at a path of a listing is below the folder, with symbolic links resolved."""
    storage, name = open_file(path) if is_absolute(path) else (folder, path)
    file, top = f"{storage.url}/{name}", folder.url
    if not (storage.is_remote or folder.is_remote):
        file, top = os.path.realpath(file), os.path.realpath(top)
    return file.startswith(f"{top.rstrip('/')}/")


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
