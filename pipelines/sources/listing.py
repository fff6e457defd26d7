"""A table that lists images: paths, labels, optional `split` and `key`; other columns go into
`json`.

The table is a CSV, JSONL or Parquet file.
"""

import posixpath
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from pipelines.holdout import REST
from pipelines.sources.base import (
    Extent,
    RawSample,
    Rejected,
    Spool,
    Survey,
    Unit,
    class_infos,
)
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.record_table import (
    LABELS,
    OTHERS,
    READERS,
    Label,
    Record,
    choose_columns,
    class_names,
    compact,
    label_in,
    usual_name,
)
from pipelines.sources.formats.spilled_list import Entry, SpilledList, spilled_units
from pipelines.sources.objects import (
    extension,
    first_names,
    image_sample,
    key_of,
    stat_of,
)
from shardset.errors import ConfigError, SourceError
from shardset.format.labels import NO_LABEL
from shardset.storage.base import Stat, Storage, join, stat_or_none
from shardset.storage.checked import read_twice
from shardset.storage.many import REQUESTS_AT_ONCE, in_order
from shardset.storage.open import is_absolute, open_file

ENTRIES_PER_UNIT = 10_000

Listed = tuple[SpilledList, Survey]
"""Rows, and what is known of them all.

A row is path, label (-1: none), split, key, metadata as JSON, and the paths of further files by
field.
"""


@dataclass(frozen=True)
class Listing:
    """The images that `file` in the folder `input` lists, one per row; errors name the line,
    counted from 1.

    `path_column` and `label_column` name the columns, None takes those with usual names; a
    `label_column` of "" means that there are no labels. `files` has the columns of further files by
    the field that each is stored as. A path is relative to `input`, absolute, or a gs:// URL.
    Labels are either all numbers, taken as they are, or all names, numbered in sorted order; `7`,
    `7.0` and texts of them are numbers, and an empty cell is no label. Raises
    ConfigError if the name of `file` has none of the known extensions.
    """

    input: Storage
    file: str
    path_column: str | None = None
    label_column: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    entries_per_unit: int = ENTRIES_PER_UNIT

    def __post_init__(self) -> None:
        if self.file and extension(self.file) not in READERS:
            raise ConfigError(
                f"{self.file}: expected a listing that ends with"
                f" {', '.join(f'.{end}' for end in READERS)}"
            )

    def survey(self) -> Survey:
        """Reads the listing and asks the storage for each file's size and generation, 32 at a
        time.

        Raises SourceError for an unexpected row. A missing file isn't an error here:
        `index` rejects it.
        """
        rows, survey = read_twice(self.listed)
        if not rows:
            raise SourceError(f"{self._where}: no rows, expected one for each image")
        labels = {info.name: info.label for info in survey.classes or ()}
        empty = "{}" if any(row[4] for row in rows) else ""
        splits, num_images, num_bytes = set[str](), 0, 0

        def entries() -> Iterator[Entry]:
            nonlocal num_images, num_bytes
            pinned = in_order(REQUESTS_AT_ONCE, rows, lambda row: (row, self._pins(row)))
            for (_, label, split, key, extra, _), pins in pinned:
                _, _, size, generation = pins[0]
                splits.add(split)
                num_images += generation is not None
                num_bytes += size
                number = labels.get(str(label), NO_LABEL)
                yield [number, split, key, extra or empty, pins]

        units = spilled_units(entries(), self.entries_per_unit)
        if not num_images:
            path = next(iter(rows))[0]
            raise SourceError(
                f"{self._where}: none of its {len(rows)} images is there, the first not as"
                f" {path if is_absolute(path) else f'{self.input.url}/{path}'}; found"
                f" {first_names(self.input, 3)}; a path is relative to the input's folder,"
                " absolute, or a gs:// URL, written with / and with its extension; the first:"
                f" {self._why_missing(path)}"
            )
        return replace(survey, units=units, splits=splits, num_bytes=num_bytes)

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """One sample for each row, pinned to the generations that the survey saw.

        Rejects an image that is missing, or that lacks a further file.
        """
        for label, split, key, extra, pins in unit["entries"]:
            (_, path, size, generation), *others = pins
            missing = next((pin for pin in pins if pin[3] is None), None)
            if missing:
                what = f"its {missing[0]}: " if missing[0] else ""
                reason = what + self._why_missing(missing[1])
                yield Rejected(name=path, split=split, reason=reason)
                continue
            content = Extent(path, generation, 0, size)
            sample = image_sample(path, key, split=split, label=label, content=content, extra=extra)
            if is_absolute(path) and key == key_of(path):
                # Wherever the listing is, and however its paths are spelled, an image is held out
                # or not.
                sample = msgspec.structs.replace(sample, drawn_by=key_of(self._name_below(path)))
            for name, file, size, generation in others:
                if name in (*sample.fields, "cls"):
                    raise SourceError(f"{path}: has {name!r} already; give --file-column another")
                sample.fields[name] = Extent(file, generation, 0, size)
            yield sample

    @property
    def _where(self) -> str:
        return f"{self.input.url}/{self.file}"

    def listed(self) -> Listed:
        """The checked rows; raises SourceError for one that is not what is expected."""
        listing = stat_of(self.input, self.file, "a .csv, .tsv, .jsonl or .parquet file")
        file = RangeFile(self.input, listing)
        table = READERS[extension(self.file)](file, self._where)
        columns = choose_columns(
            [name for name in table.names if name not in self.files.values()],
            self.path_column,
            self.label_column,
            f"{self._where}: {table.header}",
        )
        rows, labels = SpilledList(), dict[Label, str]()
        for position, record in table.rows:
            where = f"{self._where}: {position}"
            path = check_path(_text(record, columns.path, where), where)
            label = label_in(record.get(columns.label), where) if columns.label else NO_LABEL
            if not columns.label and self.label_column is None and usual_name(record, LABELS):
                raise SourceError(
                    f"{where}: a label, but {table.header} has none; give all rows a label, or none"
                )
            files = {
                name: check_path(_text(record, column, where), f"{where}: column {column}")
                for name, column in self.files.items()
            }
            used = columns.path, columns.label, *OTHERS, *self.files.values()
            extra = {name: value for name, value in record.items() if name not in used}
            metadata = compact(extra) if extra else ""
            split, key = _text(record, "split", where), _text(record, "key", where)
            rows.add([path, label, split or REST, key or key_of(path), metadata, files])
            labels.setdefault(label, position)
        names, refusal = class_names(labels, self._where)
        return rows, Survey(
            units=(),
            classes=class_infos(names),
            splits=(),
            notes=[*columns.notes()],
            objects={self.file: listing.num_bytes},
            looked_for=columns.looked_for,
            refusal=refusal,
        )

    def _name_below(self, path: str) -> str:
        """The name of an image below the folder of the listing, or else its address."""
        storage, name = open_file(path)
        return join(storage.url, name).removeprefix(f"{self.input.url.rstrip('/')}/")

    def _why_missing(self, path: str) -> str:
        """The reason of an image that is missing; a name that looks the same may be there."""
        for form in ("NFC", "NFD"):
            if (other := unicodedata.normalize(form, path)) != path and self._stat(other):
                return (
                    f"not found in the Unicode form that is listed, but in {form} (as macOS writes"
                    f" accents); list it by unicodedata.normalize({form!r}, path)"
                )
        return "not found"

    def _pins(self, row: Entry) -> list[tuple[str, str, int, str | None]]:
        """Field, path, size and generation of each file of a row, the image first; no generation if
        it is missing.
        """
        stats = [(name, file, self._stat(file)) for name, file in {"": row[0], **row[5]}.items()]
        return [
            (name, file, stat.num_bytes if stat else 0, stat.generation if stat else None)
            for name, file, stat in stats
        ]

    def _stat(self, path: str) -> Stat | None:
        folder, name = open_file(path) if is_absolute(path) else (self.input, path)
        return stat_or_none(folder, name)


def _text(record: Record, column: str, where: str) -> str:
    value = record.get(column)
    if value is not None and not isinstance(value, str):
        raise SourceError(f"{where}: {column} is {str(value)[:40]}, expected a text")
    return value or ""


def check_path(path: str, where: str) -> str:
    """The path in its plain form; SourceError that begins with `where` if no file can have it."""
    if not path or "\0" in path or path.endswith("/"):
        raise SourceError(f"{where}: path {path!r:.80}, expected a file's")
    if is_absolute(path):
        try:
            open_file(path)
        except ConfigError as error:
            raise SourceError(f"{where}: {error}") from error
        return path
    plain = posixpath.normpath(path)
    if f"{plain}/".startswith(("../", "./")):
        raise SourceError(
            f"{where}: path {path!r:.80} climbs out of the input's folder; write it as an"
            " absolute path"
        )
    return plain
