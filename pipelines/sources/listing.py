"""A table that lists images: paths, labels, optional `split` and `key`; other columns go into
`json`.

The table is a CSV, JSONL or Parquet file.
"""

import posixpath
import unicodedata
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from pipelines.holdout import Holdout
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
from pipelines.sources.formats.records import (
    LABELS,
    OTHERS,
    READERS,
    Columns,
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
)
from shardset.errors import ConfigError, SourceError
from shardset.format.labels import NO_LABEL
from shardset.storage.base import Stat, Storage, join, stat_or_none
from shardset.storage.open import is_absolute, open_file

ENTRIES_PER_UNIT = 10_000
_STAT_THREADS = 32
_ROWS_AT_ONCE = 10_000


@dataclass(slots=True)
class _Listed:
    """All rows, the columns that were taken, and the first row of each label.

    A row is path, label (-1: none), split, key, what decides on a holdout, and other columns as
    JSON.
    """

    columns: Columns
    rows: SpilledList = field(default_factory=SpilledList)
    labels: dict[Label, str] = field(default_factory=dict)
    has_extra: bool = False


@dataclass(frozen=True)
class Listing:
    """The images that `file` in the folder `input` lists, one per row; errors name the line,
    counted from 1.

    `path_column` and `label_column` name the columns, None takes those with usual names; a
    `label_column` of "" means that there are no labels. A path is relative to `input`, absolute, or
    a gs:// URL. Labels are either all numbers, taken as they are, or all names, numbered in sorted
    order; `7`, `7.0` and texts of them are numbers; an empty cell isn't a label. `holdout` is for
    listings without splits; it goes by `key` or, without one, by the image's name below `input`,
    without its extension. Raises ConfigError if the name of `file` has none of the known
    extensions.
    """

    input: Storage
    file: str
    holdout: Holdout = field(default_factory=Holdout)
    path_column: str | None = None
    label_column: str | None = None
    entries_per_unit: int = ENTRIES_PER_UNIT

    def __post_init__(self) -> None:
        if extension(self.file) not in READERS:
            raise ConfigError(
                f"{self.file}: expected a listing that ends with"
                f" {', '.join(f'.{end}' for end in READERS)}"
            )

    def survey(self) -> Survey:
        """Reads the listing and asks the storage for each image's size and generation, 32 at a
        time.

        Raises SourceError for an unexpected row. A missing image isn't an error here:
        `index` rejects it.
        """
        listing = stat_or_none(self.input, self.file)
        if not listing:
            raise SourceError(
                f"{self._where}: no such listing; name a .csv, .tsv, .jsonl or .parquet file as"
                " input"
            )
        listed = self._listed(listing)
        if not listed.rows:
            raise SourceError(f"{self._where}: no rows, expected one for each image")
        names, refusal = class_names(listed.labels, self._where)
        seen: set[tuple[str, int]] = set()
        found: Counter[str] = Counter()

        def entries() -> Iterator[Entry]:
            for entry in self._entries(listed, {name: label for label, name in enumerate(names)}):
                seen.add((entry[4], entry[3]))
                found["images"] += entry[2] is not None
                found["bytes"] += entry[1]
                yield entry

        units = spilled_units(entries(), self.entries_per_unit)
        if not found["images"]:
            path = next(iter(listed.rows))[0]
            raise SourceError(
                f"{self._where}: none of its {len(listed.rows)} images is there, the first not as"
                f" {path if is_absolute(path) else f'{self.input.url}/{path}'}; found"
                f" {first_names(self.input, 3)}; a path is relative to the listing's folder,"
                " absolute, or a gs:// URL, written with / and with its extension; the first:"
                f" {self._why_missing(path)}"
            )
        return Survey(
            units=units,
            classes=class_infos(names),
            notes=[
                *listed.columns.notes(),
                *self.holdout.notes(seen, names),
            ],
            objects={self.file: listing.num_bytes},
            num_bytes=found["bytes"],
            looked_for=listed.columns.looked_for,
            refusal=refusal,
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """One sample for each row, pinned to the generation that the survey saw.

        Rejects a missing image.
        """
        for path, num_bytes, generation, label, split, key, extra in unit["entries"]:
            if generation is None:
                yield Rejected(name=path, split=split, reason=self._why_missing(path))
                continue
            yield image_sample(
                path,
                key,
                split=split,
                label=label,
                content=Extent(path, generation, 0, num_bytes),
                extra=extra,
            )

    @property
    def _where(self) -> str:
        return f"{self.input.url}/{self.file}"

    def _listed(self, listing: Stat) -> _Listed:
        """The checked rows."""
        file = RangeFile(self.input, listing, twice=True)
        table = READERS[extension(self.file)](file, self._where)
        columns = choose_columns(
            table.names, self.path_column, self.label_column, f"{self._where}: {table.header}"
        )
        listed = _Listed(columns)
        for position, record in table.rows:
            where = f"{self._where}: {position}"
            path, label, split, key, extra = _row(record, columns, where)
            if not columns.label and self.label_column is None and usual_name(record, LABELS):
                raise SourceError(
                    f"{where}: a label, but {table.header} has none; give all rows a label, or none"
                )
            if split:
                self.holdout.check_unsplit(where, [split])
            # Wherever the listing is, and however its paths are spelled, an image is held out or
            # not.
            decisive = key or key_of(self._name_below(path) if self.holdout else path)
            listed.rows.add([path, label, split, key or key_of(path), decisive, extra])
            listed.labels.setdefault(label, position)
            listed.has_extra = listed.has_extra or bool(extra)
        return listed

    def _name_below(self, path: str) -> str:
        """The name of an image below the folder of the listing, or else its address."""
        if not is_absolute(path):
            return path
        storage, name = open_file(path)
        return join(storage.url, name).removeprefix(f"{self.input.url.rstrip('/')}/")

    def _entries(self, listed: _Listed, labels: dict[str, int]) -> Iterator[Entry]:
        empty = "{}" if listed.has_extra else ""
        rows = iter(listed.rows)
        holdout = self.holdout.by_class(
            lambda: ((row[4], row[1]) for row in listed.rows if row[1] != NO_LABEL)
        )
        with ThreadPoolExecutor(_STAT_THREADS) as threads:
            while some := list(islice(rows, _ROWS_AT_ONCE)):
                stats = threads.map(self._stat, [path for path, *_ in some])
                for (path, label, split, key, decisive, extra), stat in zip(
                    some, stats, strict=True
                ):
                    split = split or holdout.split_of(decisive, label)
                    num_bytes, generation = (stat.num_bytes, stat.generation) if stat else (0, None)
                    number = labels.get(str(label), NO_LABEL)
                    yield [path, num_bytes, generation, number, split, key, extra or empty]

    def _why_missing(self, path: str) -> str:
        """The reason of an image that is missing; a name that looks the same may be there."""
        for form in ("NFC", "NFD"):
            if (other := unicodedata.normalize(form, path)) != path and self._stat(other):
                return (
                    f"not found in the Unicode form that is listed, but in {form} (as macOS writes"
                    f" accents); list it by unicodedata.normalize({form!r}, path)"
                )
        return "not found"

    def _stat(self, path: str) -> Stat | None:
        return (
            stat_or_none(*open_file(path)) if is_absolute(path) else stat_or_none(self.input, path)
        )


def _row(record: Record, columns: Columns, where: str) -> tuple[str, Label, str, str, str]:
    """The checked path, label, split, key and other columns; texts may be empty."""
    path = _check_path(_text(record, columns.path, where), where)
    split, key = _text(record, "split", where), _text(record, "key", where)
    extra = {
        name: value
        for name, value in record.items()
        if name not in (columns.path, columns.label, *OTHERS)
    }
    label = label_in(record.get(columns.label), where) if columns.label else NO_LABEL
    return path, label, split, key, compact(extra) if extra else ""


def _text(record: Record, column: str, where: str) -> str:
    value = record.get(column)
    if value is not None and not isinstance(value, str):
        raise SourceError(f"{where}: {column} is {str(value)[:40]}, expected a text")
    return value or ""


def _check_path(path: str, where: str) -> str:
    if not path or "\0" in path or path.endswith("/"):
        raise SourceError(f"{where}: path {path!r:.80}, expected that of an image")
    if is_absolute(path):
        try:
            open_file(path)
        except ConfigError as error:
            raise SourceError(f"{where}: {error}") from error
        return path
    plain = posixpath.normpath(path)
    if f"{plain}/".startswith(("../", "./")):
        raise SourceError(
            f"{where}: path {path!r:.80} climbs out of the listing's folder; write it as an"
            " absolute path"
        )
    return plain
