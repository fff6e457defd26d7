"""The values of a column where somebody has written them: a NumPy array, a Parquet file, or tars."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.config import ColumnConfig
from pipelines.sources.formats.parquet import open_parquet, parquet_errors
from pipelines.sources.formats.range_file import RangeFile
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format.columns import array_kind
from shardset.storage.open import open_file
from shardset.stream.samples import SampleSet

Find = Callable[[Sequence[str], int], list[bytes]]
"""The values of neighbouring samples by their keys and the first of their ids; b"" for one without."""


@dataclass(frozen=True)
class Values:
    """Values of samples, as the contents of members with this extension; `identity` changes with them."""

    where: str
    identity: Sequence[str]
    num_bytes: int
    extension: str
    of: Find

    def header_of(self, content: bytes) -> str:
        """The header of an array, as text; "" for values that are bytes. Raises SourceError if it is none."""
        if self.extension != "npy":
            return ""
        header, dtype, shape = array_kind(content, self.where)
        if len(content) != len(header) + dtype.itemsize * math.prod(shape):
            raise refused(self.where, f"{len(content)} bytes for an array of {dtype} {shape}")
        return header.decode("latin-1")


def refused(where: str, found: str) -> ConfigError:
    """The error for values that can't make a column."""
    return ConfigError(f"{where}: holds {found}, which can't be the values of a column; see docs/columns.md")


def open_values(config: ColumnConfig, split_sizes: Sequence[int]) -> Values:
    """The values for splits of so many samples; raises ConfigError or SourceError for what can't be theirs."""
    if not config.source.endswith((".npy", ".parquet")):
        return _tars(config)
    storage, name = open_file(config.source)
    stat = storage.stat(name)
    file = RangeFile(storage, stat, twice=True)
    is_array = name.endswith(".npy")
    extension, of = _array(file, stat.num_bytes, config, split_sizes) if is_array else _table(file, config)
    return Values(config.source, (config.source, stat.generation, config.field or ""), stat.num_bytes, extension, of)


def _array(file: RangeFile, num_bytes: int, config: ColumnConfig, split_sizes: Sequence[int]) -> tuple[str, Find]:
    """Row n is the value of the sample with id n."""
    begin = file.read(10)
    header, dtype, shape = array_kind(begin + file.read(int.from_bytes(begin[8:], "little")), config.source)
    size = dtype.itemsize * math.prod(shape[1:])
    if [*split_sizes] != [*shape[:1]] or num_bytes != len(header) + split_sizes[0] * size:
        found = f"an array {shape} in {num_bytes} bytes for {split_sizes} samples (choose one split by --split)"
        raise refused(config.source, found)

    def of(keys: Sequence[str], first_id: int) -> list[bytes]:
        file.seek(len(header) + first_id * size)
        rows = np.frombuffer(file.read(len(keys) * size), dtype).reshape(len(keys), *shape[1:])
        return [_npy(row) for row in rows]

    return "npy", of


def _table(file: RangeFile, config: ColumnConfig) -> tuple[str, Find]:
    """A row has the value of the sample with its `key`; null is no value. Holds the table in memory."""
    parquet = open_parquet(file, config.source)
    names = parquet.schema_arrow.names
    fields = [config.field] if config.field else [name for name in names if name != "key"]
    if "key" not in names or len(fields) != 1 or fields[0] not in names:
        raise refused(config.source, f"the columns {', '.join(names)} (expected key and one more, or --field)")
    with parquet_errors(config.source):
        table = parquet.read(["key", *fields]).combine_chunks()
    values, kind = table.column(fields[0]), table.schema.field(fields[0]).type
    extension = "npy" if hasattr(kind, "value_type") else "txt" if str(kind) == "string" else "bin"

    def content(scalar: Any) -> bytes:
        if not scalar.is_valid:
            return b""
        if extension == "npy":
            return _npy(scalar.values.to_numpy(zero_copy_only=False))
        value = scalar.as_py()
        if not isinstance(value, str | bytes):
            raise refused(config.source, f"values of type {kind} (expected bytes, texts or lists of numbers)")
        return value.encode() if isinstance(value, str) else value

    return extension, _by_key(
        config, table.column("key").to_pylist(), lambda rows: [content(values[row]) for row in rows]
    )


def _tars(config: ColumnConfig) -> Values:
    """A sample of another set, built or adopted, has the value of the sample with its key."""
    loaded = manifests.load(config.source)
    splits = loaded.manifest.splits
    split = config.split if config.split in splits else next(iter(splits))
    samples = SampleSet(loaded, split)
    fields = [config.field] if config.field else samples.split.fields
    if len(fields) != 1 or fields[0] not in samples.split.fields or (len(splits) > 1 and split != config.split):
        found = f"{len(splits)} splits and the fields {', '.join(samples.split.fields)}"
        raise refused(config.source, f"{found} (needs one, or --split and --field)")
    indexes = samples.table.indexes(range(samples.split.num_shards))
    keys = [key.decode("ascii") for index in indexes if index.keys is not None for key in index.keys.tolist()]
    of = _by_key(
        config, keys, lambda rows: [each.fields.get(fields[0], b"") for each in samples.__getitems__(rows)]
    )  # fmt: skip
    identity = loaded.manifest.digest, split, *fields
    return Values(config.source, identity, samples.split.num_tar_bytes, fields[0].rpartition(".")[2], of)


def _by_key(config: ColumnConfig, keys: Sequence[str], read: Callable[[Sequence[int]], list[bytes]]) -> Find:
    row_of = {key: row for row, key in enumerate(keys)}
    if len(row_of) < max(1, len(keys)):
        raise refused(config.source, "no row, or a key twice")

    def of(keys: Sequence[str], first_id: int) -> list[bytes]:
        rows = [row_of[key] for key in keys if key in row_of]
        contents = dict(zip(rows, read(rows), strict=True))
        return [contents.get(row_of.get(key, -1), b"") for key in keys]

    return of


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
