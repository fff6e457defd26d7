"""The values of a column where somebody has written them: a NumPy array, a Parquet file, or tars."""

import math
from collections.abc import Sequence
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
    """Values of samples, as the contents of their members; `extension` is that of the members.

    `identity` changes with the values. `are_by_key` says whether samples have them by key, or by id.
    """

    where: str
    identity: list[str]
    num_bytes: int
    extension: str
    are_by_key = True
    _rows: dict[str, int]

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        """The values of neighbouring samples, b"" for one without; raises SourceError."""
        at = {self._rows[key]: at for at, key in enumerate(keys) if key in self._rows}
        contents, rows = [b""] * len(keys), sorted(at)
        for row, content in zip(rows, self._contents(rows), strict=True):
            contents[at[row]] = content
        return contents

    def header_of(self, content: bytes) -> str:
        """The header of an array, as text; "" for values that are bytes. Raises SourceError if it is none."""
        if self.extension != "npy":
            return ""
        header, dtype, shape = array_kind(content, self.where)
        if len(content) != len(header) + dtype.itemsize * math.prod(shape):
            self.refuse(f"{len(content)} bytes for an array of {dtype} {shape}")
        return header.decode("latin-1")

    def refuse(self, found: str) -> NoReturn:
        """Raises ConfigError for values that can't make a column."""
        raise ConfigError(f"{self.where}: holds {found}, which can't be the values of a column; see docs/columns.md")

    def _contents(self, rows: Sequence[int]) -> list[bytes]:
        """The values in some rows, in ascending order."""
        raise NotImplementedError

    def _set_keys(self, keys: Sequence[str]) -> None:
        self._rows = {key: row for row, key in enumerate(keys)}
        if len(self._rows) != len(keys) or not keys:
            self.refuse("no row, or a key twice")

    def _open(self, url: str) -> RangeFile:
        storage, name = open_file(url)
        stat = storage.stat(name)
        self.where, self.identity, self.num_bytes = url, [url, stat.generation], stat.num_bytes
        return RangeFile(storage, stat, twice=True)


def open_values(config: ColumnConfig, split_sizes: Sequence[int]) -> Values:
    """The values for splits of so many samples; raises ConfigError or SourceError for what can't be theirs."""
    if config.source.endswith(".npy"):
        return _Array(config, split_sizes)
    return _Table(config) if config.source.endswith(".parquet") else _Tars(config)


class _Array(Values):
    """Row n is the value of the sample with id n."""

    extension = "npy"
    are_by_key = False

    def __init__(self, config: ColumnConfig, split_sizes: Sequence[int]) -> None:
        self._file = self._open(config.source)
        begin = self._file.read(10)
        header, dtype, shape = array_kind(begin + self._file.read(int.from_bytes(begin[8:], "little")), self.where)
        self._start, self._size = len(header), dtype.itemsize * math.prod(shape[1:])
        if [*split_sizes] != [*shape[:1]] or self.num_bytes != self._start + split_sizes[0] * self._size:
            self.refuse(f"an array {shape} in {self.num_bytes} bytes for {split_sizes} samples (choose one --split)")
        self._header = array_header(dtype, shape[1:])

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        self._file.seek(self._start + first_id * self._size)
        return [self._header + self._file.read(self._size) for _ in keys]


class _Table(Values):
    """A row has the value of the sample with its `key`; null is no value."""

    def __init__(self, config: ColumnConfig) -> None:
        self._file = open_parquet(self._open(config.source), config.source)
        names = self._file.schema_arrow.names
        fields = [config.field] if config.field else [name for name in names if name != "key"]
        if "key" not in names or len(fields) != 1 or fields[0] not in names:
            self.refuse(f"the columns {', '.join(names)}: expected key and one more, or --field")
        self._fields, kind = fields, self._file.schema_arrow.field(fields[0]).type
        self.extension = "npy" if hasattr(kind, "value_type") else "txt" if pa.types.is_string(kind) else "bin"
        with parquet_errors(self.where):
            self._set_keys(self._file.read(["key"]).column(0).to_pylist())
        groups = range(self._file.num_row_groups)
        self._starts = np.cumsum([0, *(self._file.metadata.row_group(group).num_rows for group in groups)])
        self._held = -1, pa.chunked_array([[]])

    def _contents(self, rows: Sequence[int]) -> list[bytes]:
        with parquet_errors(self.where):
            return [self._content(row) for row in rows]

    def _content(self, row: int) -> bytes:
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        if self._held[0] != group:  # keeps the last one, so rows in the order of the set are read once
            self._held = group, self._file.read_row_group(group, columns=self._fields).column(0)
        scalar: Any = self._held[1][row - int(self._starts[group])]
        if not scalar.is_valid:
            return b""
        if self.extension == "npy":
            array = np.asarray(scalar.values.to_numpy(zero_copy_only=False))
            return array_header(array.dtype, array.shape) + array.tobytes()
        value = scalar.as_py()
        if not isinstance(value, str | bytes):
            self.refuse(f"{scalar.type} in {self._fields[0]}: expected bytes, texts or lists of numbers")
        return value.encode() if isinstance(value, str) else value


class _Tars(Values):
    """A sample of another set, built or adopted, has the value of the sample with its key."""

    def __init__(self, config: ColumnConfig) -> None:
        loaded = manifests.load(config.source)
        splits = loaded.manifest.splits
        self.where = config.source
        split = config.split if config.split in splits else next(iter(splits))
        self._samples = SampleSet(loaded, split)
        fields, table = self._samples.split.fields, self._samples.table
        named = [config.field] if config.field else fields
        if len(named) != 1 or named[0] not in fields or (len(splits) > 1 and split != config.split):
            self.refuse(f"{len(splits)} splits and the fields {', '.join(fields)}: needs one, or --split and --field")
        [self._field] = named
        self.identity, self.num_bytes = [loaded.manifest.digest, split, self._field], self._samples.split.num_tar_bytes
        self.extension = self._field.rpartition(".")[2]
        indexes = table.indexes(range(self._samples.split.num_shards))
        self._set_keys([key.decode() for index in indexes if index.keys is not None for key in index.keys.tolist()])

    def _contents(self, rows: Sequence[int]) -> list[bytes]:
        return [sample.fields.get(self._field, b"") for sample in self._samples.__getitems__(rows)]
