"""The values of a column where somebody has written them: a NumPy array, a Parquet file, or tars."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from pipelines.config import ColumnConfig
from pipelines.sources.formats.parquet import open_parquet, parquet_errors
from pipelines.sources.formats.range_file import RangeFile
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format.columns import array_header, array_kind
from shardset.storage.open import open_file
from shardset.stream.samples import SampleSet


class Values:
    """Values of samples, as the contents of their members. `extension` is that of the members.

    `identity` changes with the values. `num_values` is None where a sample has its value by id.
    """

    where: str
    identity: list[str]
    num_bytes: int
    num_values: int | None = None
    extension: str

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        """The values of neighbouring samples, b"" for one without; raises SourceError."""
        raise NotImplementedError

    def refuse(self, found: str) -> NoReturn:
        """Raises ConfigError for values that can't make a column."""
        raise ConfigError(f"{self.where}: holds {found}, which can't be the values of a column; see docs/columns.md")

    def _open(self, url: str) -> RangeFile:
        storage, name = open_file(url)
        stat = storage.stat(name)
        self.where, self.identity, self.num_bytes = url, [url, stat.generation], stat.num_bytes
        return RangeFile(storage, stat, twice=True)


def open_values(config: ColumnConfig, num_samples: Mapping[str, int]) -> Values:
    """The values for splits of so many samples; raises ConfigError or SourceError for what can't be theirs."""
    if config.source.endswith(".npy"):
        return _Array(config, num_samples)
    return _Table(config, num_samples) if config.source.endswith(".parquet") else _Tars(config)


class _Array(Values):
    """Row n is the value of the sample with id n."""

    extension = "npy"

    def __init__(self, config: ColumnConfig, num_samples: Mapping[str, int]) -> None:
        self._file = self._open(config.source)
        begin = self._file.read(10)
        begin += self._file.read(int.from_bytes(begin[8:], "little"))
        dtype, shape = array_kind(begin, self.where)
        if [*num_samples.values()] != [*shape[:1]]:
            self.refuse(f"an array {shape} for {dict(num_samples)} samples (choose one split by --split)")
        self._header, self._start = array_header(dtype, shape[1:]), len(begin)
        self._size = dtype.itemsize * int(np.prod(shape[1:]))

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        self._file.seek(self._start + first_id * self._size)
        return [self._header + self._file.read(self._size) for _ in keys]


class _Table(Values):
    """A row has the value of the sample with its `key`, or else with its `id`; null is no value."""

    def __init__(self, config: ColumnConfig, num_samples: Mapping[str, int]) -> None:
        self._file = open_parquet(self._open(config.source), config.source)
        names = self._file.schema_arrow.names
        by = "key" if "key" in names else "id"
        others = [name for name in names if name not in ("key", "id")]
        self._field = config.field or (others[0] if len(others) == 1 else "")
        if by not in names or self._field not in names or (by == "id" and len(num_samples) > 1):
            self.refuse(f"{', '.join(names)}: expected key (or id, with --split) and one column, or --field")
        with parquet_errors(self.where):
            wanted = self._file.read([by]).column(0).to_numpy()
        self._order = np.argsort(wanted, kind="stable")
        self._wanted = wanted[self._order]
        if not len(wanted) or (self._wanted[1:] == self._wanted[:-1]).any():
            self.refuse(f"no row, or a {by} twice")
        self.num_values = len(wanted) if by == "key" else None
        groups = range(self._file.num_row_groups)
        self._starts = np.cumsum([0, *(self._file.metadata.row_group(group).num_rows for group in groups)])
        self._held: tuple[int, pa.ChunkedArray] | None = None
        kind = self._file.schema_arrow.field(self._field).type
        self.extension = "npy" if hasattr(kind, "value_type") else "txt" if pa.types.is_string(kind) else "bin"

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        asked = first_id + np.arange(len(keys)) if self.num_values is None else np.array(keys, object)
        at = np.minimum(np.searchsorted(self._wanted, asked), len(self._wanted) - 1)
        rows, contents = self._order[at], [b""] * len(keys)
        found = np.flatnonzero(self._wanted[at] == asked)
        for position in found[np.argsort(rows[found])].tolist():
            group = int(np.searchsorted(self._starts, rows[position], side="right")) - 1
            contents[position] = self._content(self._group(group)[int(rows[position] - self._starts[group])])
        return contents

    def _group(self, number: int) -> pa.ChunkedArray:
        """The values of a row group; keeps the last one, so rows in the order of the set are read once."""
        if self._held is None or self._held[0] != number:
            with parquet_errors(self.where):
                self._held = number, self._file.read_row_group(number, columns=[self._field]).column(0)
        return self._held[1]

    def _content(self, scalar: Any) -> bytes:
        if not scalar.is_valid:
            return b""
        if self.extension == "npy":
            array = np.asarray(scalar.values.to_numpy(zero_copy_only=False))
            return array_header(array.dtype, array.shape) + array.tobytes()
        value = scalar.as_py()
        if not isinstance(value, str | bytes):
            self.refuse(f"{scalar.type} in {self._field}: expected bytes, texts or lists of numbers")
        return value.encode() if isinstance(value, str) else value


class _Tars(Values):
    """A sample of another set, built or adopted, has the value of the sample with its key."""

    def __init__(self, config: ColumnConfig) -> None:
        loaded = manifests.load(config.source)
        self.where, splits = config.source, loaded.manifest.splits
        self._samples = SampleSet(loaded, next(iter(splits)))
        fields = self._samples.split.fields
        self._field = config.field or fields[0]
        if len(splits) > 1 or self._field not in fields or (len(fields) > 1 and not config.field):
            self.refuse(f"{len(splits)} splits and the fields {', '.join(fields)}: needs one, or --field")
        self.identity, self.num_bytes = [loaded.manifest.digest, self._field], self._samples.split.num_tar_bytes
        self.num_values, self.extension = len(self._samples), self._field.rpartition(".")[2]

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        known = [at for at, key in enumerate(keys) if key in self._samples]
        contents = [b""] * len(keys)
        for at, sample in zip(known, self._samples.__getitems__([keys[at] for at in known]), strict=True):
            contents[at] = sample.fields.get(self._field, b"")
        return contents
