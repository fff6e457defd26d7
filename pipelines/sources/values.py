"""The values of a column where somebody has written them: a NumPy array, a Parquet file, or tars."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from pipelines.config import ColumnConfig
from pipelines.sources.formats.parquet import open_parquet, parquet_errors
from pipelines.sources.formats.range_file import RangeFile
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format.columns import array_header, array_kind
from shardset.storage.open import open_file
from shardset.stream.samples import SampleSet


class Values:
    """Values of samples, as the contents of their members, whose extension is `extension`.

    `identity` changes with the values, of which there are `num_bytes` at `where`.
    """

    where: str
    identity: list[str]
    num_bytes: int
    extension: str

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        """The values of neighbouring samples, b"" for one without; raises SourceError."""
        raise NotImplementedError

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

    def __init__(self, config: ColumnConfig, split_sizes: Sequence[int]) -> None:
        self._file = self._open(config.source)
        begin = self._file.read(10)
        header, dtype, shape = array_kind(begin + self._file.read(int.from_bytes(begin[8:], "little")), self.where)
        self._start, self._size = len(header), dtype.itemsize * math.prod(shape[1:])
        if [*split_sizes] != [*shape[:1]] or self.num_bytes != self._start + split_sizes[0] * self._size:
            self.refuse(f"an array {shape} in {self.num_bytes} bytes for {split_sizes} samples (choose one by --split)")
        self._header = array_header(dtype, shape[1:])

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        self._file.seek(self._start + first_id * self._size)
        return [self._header + self._file.read(self._size) for _ in keys]


class _Table(Values):
    """A row has the value of the sample with its `key`; null is no value. The table is in memory."""

    def __init__(self, config: ColumnConfig) -> None:
        file = open_parquet(self._open(config.source), config.source)
        names = file.schema_arrow.names
        fields = [config.field] if config.field else [name for name in names if name != "key"]
        if "key" not in names or len(fields) != 1 or fields[0] not in names:
            self.refuse(f"the columns {', '.join(names)}: expected key and one more, or --field")
        with parquet_errors(self.where):
            keys, self._values = file.read(["key"]).column(0).to_pylist(), file.read(fields).column(0).combine_chunks()
        self._rows = {key: row for row, key in enumerate(keys)}
        if len(self._rows) < max(1, len(keys)):
            self.refuse("no row, or a key twice")
        kind = self._values.type
        self.extension = "npy" if hasattr(kind, "value_type") else {"string": "txt"}.get(str(kind), "bin")

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        with parquet_errors(self.where):
            return [self._content(self._values[self._rows[key]]) if key in self._rows else b"" for key in keys]

    def _content(self, scalar: Any) -> bytes:
        if not scalar.is_valid:
            return b""
        if self.extension == "npy":
            array = np.asarray(scalar.values.to_numpy(zero_copy_only=False))
            return array_header(array.dtype, array.shape) + array.tobytes()
        value = scalar.as_py()
        if not isinstance(value, str | bytes):
            self.refuse(f"values of type {scalar.type}: expected bytes, texts or lists of numbers")
        return value.encode() if isinstance(value, str) else value


class _Tars(Values):
    """A sample of another set, built or adopted, has the value of the sample with its key."""

    def __init__(self, config: ColumnConfig) -> None:
        loaded = manifests.load(config.source)
        self.where, splits = config.source, loaded.manifest.splits
        split = config.split if config.split in splits else next(iter(splits))
        self._samples = SampleSet(loaded, split)
        stored = self._samples.split.fields
        fields = [config.field] if config.field else stored
        if (
            len(fields) != 1
            or fields[0] not in self._samples.split.fields
            or (len(splits) > 1 and split != config.split)
        ):
            self.refuse(f"{len(splits)} splits and the fields {', '.join(stored)}: needs one, or --split and --field")
        self.identity, self.num_bytes = [loaded.manifest.digest, split, *fields], self._samples.split.num_tar_bytes
        self._field, self.extension = fields[0], fields[0].rpartition(".")[2]
        if repeated := self._samples.repeated_key():
            self.refuse(f"the key {repeated!r} twice")

    def of(self, keys: Sequence[str], first_id: int) -> list[bytes]:
        known = [at for at, key in enumerate(keys) if key in self._samples]
        contents = [b""] * len(keys)
        for at, sample in zip(known, self._samples.__getitems__([keys[at] for at in known]), strict=True):
            contents[at] = sample.fields.get(self._field, b"")
        return contents
