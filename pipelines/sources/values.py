"""The values of a column where somebody has written them: a NumPy array, a Parquet file, or tars."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.config import ColumnConfig
from pipelines.sources.formats.parquet import open_parquet, parquet_errors
from pipelines.sources.formats.range_file import RangeFile
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.storage.open import open_file
from shardset.stream.samples import SampleSet

Value = NDArray[Any] | bytes


class Values:
    """Values of samples. `extension` is that of their members: `npy` for arrays, any other for bytes.

    `identity` changes with the values. `num_values` is None where a sample has its value by id.
    """

    where: str
    identity: list[str]
    num_bytes: int
    num_values: int | None = None
    extension: str

    def example(self) -> Value:
        """A value, whose dtype and shape are those of all; raises ConfigError if there is none."""
        raise NotImplementedError

    def of(self, keys: Sequence[str], first_id: int) -> list[Value | None]:
        """The values of neighbouring samples, None for one without."""
        raise NotImplementedError


def open_values(config: ColumnConfig, num_samples: Mapping[str, int]) -> Values:
    """The values for splits of so many samples; raises ConfigError or SourceError for what can't be theirs."""
    if config.source.endswith(".npy"):
        return _Array(config.source, num_samples)
    return _Table(config, num_samples) if config.source.endswith(".parquet") else _Tars(config)


class _Array(Values):
    """Row n is the value of the sample with id n."""

    extension = "npy"

    def __init__(self, url: str, num_samples: Mapping[str, int]) -> None:
        self.where = url
        self._file = _opened(self, url)
        try:
            np.lib.format.read_magic(self._file)
            (num_rows, *shape), is_fortran, self._dtype = np.lib.format.read_array_header_1_0(self._file)
        except ValueError as error:
            raise SourceError(f"{url}: no rows of a NumPy array ({error}); write it with numpy.save") from error
        if is_fortran or [*num_samples.values()] != [num_rows]:
            refuse(url, f"{num_rows} rows{' in Fortran order' if is_fortran else ''} for {dict(num_samples)} samples")
        self._shape, self._start = tuple(shape), self._file.tell()

    def example(self) -> Value:
        return self._rows(0, 1)[0]

    def of(self, keys: Sequence[str], first_id: int) -> list[Value | None]:
        return [*self._rows(first_id, len(keys))]

    def _rows(self, first: int, num_rows: int) -> NDArray[Any]:
        size = self._dtype.itemsize * int(np.prod(self._shape))
        self._file.seek(self._start + first * size)
        return np.frombuffer(self._file.read(num_rows * size), self._dtype).reshape(num_rows, *self._shape)


class _Table(Values):
    """A row has the value of the sample with its `key`, or else with its `id`; null is no value."""

    def __init__(self, config: ColumnConfig, num_samples: Mapping[str, int]) -> None:
        self.where = config.source
        self._file = open_parquet(_opened(self, config.source), self.where)
        names = self._file.schema_arrow.names
        by = "key" if "key" in names else "id"
        others = [name for name in names if name not in ("key", "id")]
        self._field = config.field or (others[0] if len(others) == 1 else "")
        if by not in names or self._field not in names or (by == "id" and len(num_samples) > 1):
            refuse(self.where, f"{', '.join(names)}: expected key (or id, with --split) and one column, or --field")
        with parquet_errors(self.where):
            wanted = self._file.read([by]).column(0).to_numpy()
        self._order = np.argsort(wanted, kind="stable")
        self._wanted = wanted[self._order]
        if (self._wanted[1:] == self._wanted[:-1]).any():
            refuse(self.where, f"a {by} twice")
        self.num_values = len(wanted) if by == "key" else None
        groups = range(self._file.num_row_groups)
        self._starts = np.cumsum([0, *(self._file.metadata.row_group(group).num_rows for group in groups)])
        self._held: tuple[int, pa.ChunkedArray] | None = None
        kind = self._file.schema_arrow.field(self._field).type
        self.extension = "txt" if pa.types.is_string(kind) else "npy" if hasattr(kind, "value_type") else "bin"

    def example(self) -> Value:
        values = (_value(each) for group in range(self._file.num_row_groups) for each in self._group(group))
        return _first(values, self.where)

    def of(self, keys: Sequence[str], first_id: int) -> list[Value | None]:
        asked = np.array(keys, object) if self.num_values is not None else first_id + np.arange(len(keys))
        at = np.minimum(np.searchsorted(self._wanted, asked), len(self._wanted) - 1)
        values: list[Value | None] = [None] * len(keys)
        rows, found = self._order[at], self._wanted[at] == asked
        for position in sorted(np.flatnonzero(found).tolist(), key=lambda position: rows[position]):
            group = int(np.searchsorted(self._starts, rows[position], side="right")) - 1
            values[position] = _value(self._group(group)[int(rows[position] - self._starts[group])])
        return values

    def _group(self, number: int) -> pa.ChunkedArray:
        """The values of a row group; keeps the last one, so rows in the order of the set are read once."""
        if self._held is None or self._held[0] != number:
            with parquet_errors(self.where):
                self._held = number, self._file.read_row_group(number, columns=[self._field]).column(0)
        return self._held[1]


class _Tars(Values):
    """A sample of another set, built or adopted, has the value of the sample with its key."""

    def __init__(self, config: ColumnConfig) -> None:
        loaded = manifests.load(config.source)
        self.where, splits = config.source, loaded.manifest.splits
        self._samples = SampleSet(loaded, next(iter(splits)))
        fields = self._samples.split.fields
        self._field = config.field or fields[0]
        if len(splits) > 1 or self._field not in fields or (len(fields) > 1 and not config.field):
            refuse(self.where, f"{len(splits)} splits and the fields {', '.join(fields)}: choose one with --field")
        self.identity, self.num_bytes = [loaded.manifest.digest, self._field], self._samples.split.num_tar_bytes
        self.num_values, self.extension = len(self._samples), self._field.rpartition(".")[2]

    def example(self) -> Value:
        values = (self._value(sample.fields) for sample in self._samples)
        return _first(values, self.where)

    def of(self, keys: Sequence[str], first_id: int) -> list[Value | None]:
        known = [at for at, key in enumerate(keys) if key in self._samples]
        values: list[Value | None] = [None] * len(keys)
        for at, sample in zip(known, self._samples.__getitems__([keys[at] for at in known]), strict=True):
            values[at] = self._value(sample.fields)
        return values

    def _value(self, fields: Mapping[str, bytes]) -> Value | None:
        content = fields.get(self._field)
        if content is None or self.extension != "npy":
            return content
        try:
            return np.asarray(np.load(io.BytesIO(content), allow_pickle=False))
        except (ValueError, EOFError) as error:
            raise SourceError(f"{self.where}: a {self._field} is no array ({error}); write it again") from error


def refuse(where: str, found: str) -> NoReturn:
    """Raises ConfigError for values that can't make a column."""
    raise ConfigError(f"{where}: holds {found}, which can't be the values of a column; see docs/columns.md")


def _opened(values: Values, url: str) -> RangeFile:
    storage, name = open_file(url)
    stat = storage.stat(name)
    values.identity, values.num_bytes = [url, stat.generation], stat.num_bytes
    return RangeFile(storage, stat, twice=True)


def _first(values: Iterable[Value | None], where: str) -> Value:
    for value in values:
        if value is not None:
            return value
    refuse(where, "no value")


def _value(scalar: Any) -> Value | None:
    """A list as an array, bytes, or a text as UTF-8; None for null."""
    if not scalar.is_valid:
        return None
    if hasattr(scalar, "values"):
        return np.asarray(scalar.values.to_numpy(zero_copy_only=False))
    value = scalar.as_py()
    return value.encode() if isinstance(value, str) else value
