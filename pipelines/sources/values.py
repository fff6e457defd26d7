"""The values of a column where somebody has written them: a NumPy array, a Parquet file, or tars."""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.config import ColumnConfig
from pipelines.sources.formats.parquet import open_parquet, parquet_errors
from pipelines.sources.formats.range_file import RangeFile
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.storage.open import open_file
from shardset.stream.samples import SampleSet

Value = NDArray[Any] | bytes | None
Read = Callable[[Sequence[int]], Sequence[Value]]


class Values(NamedTuple):
    """Values of samples: arrays, which are `npy`, or bytes with another extension. `identity` changes with them.

    `read` gives those in some rows. A row is that of the sample with its key in `rows`, or else with its id.
    """

    identity: Sequence[str]
    num_bytes: int
    extension: str
    read: Read
    rows: dict[str, int] | None = None

    def of(self, keys: Sequence[str], first_id: int) -> Sequence[Value]:
        """The values of neighbouring samples, None for one without; raises SourceError."""
        if self.rows is None:
            return self.read(range(first_id, first_id + len(keys)))
        rows = [self.rows[key] for key in keys if key in self.rows]
        found = dict(zip(rows, self.read(rows), strict=True))
        return [found.get(self.rows.get(key, -1)) for key in keys]


def refused(config: ColumnConfig, found: object) -> ConfigError:
    """The error for values that can't make a column."""
    return ConfigError(f"{config.source}: holds {found}, which can't be the values of a column; see docs/columns.md")


def open_values(config: ColumnConfig, split_sizes: Sequence[int]) -> Values:
    """The values for splits of so many samples; raises ConfigError or SourceError for what can't be theirs."""
    if not config.source.endswith((".npy", ".parquet")):
        return _tars(config)
    storage, name = open_file(config.source)
    stat = storage.stat(name)
    file, identity = RangeFile(storage, stat, twice=True), (config.source, stat.generation, config.field or "")
    if name.endswith(".parquet"):
        return Values(identity, stat.num_bytes, *_table(file, config))
    try:
        np.lib.format.read_magic(file)
        shape, is_transposed, dtype = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        raise SourceError(f"{config.source}: not a NumPy file of version 1.0 ({error}); write it again") from error
    start, size = file.tell(), dtype.itemsize * math.prod(shape[1:])
    if [*split_sizes] != [*shape[:1]] or is_transposed or stat.num_bytes != start + shape[0] * size:
        found = f"{dtype} {shape} in {'Fortran' if is_transposed else 'C'} order, {stat.num_bytes} bytes"
        raise refused(config, f"{found}, for {split_sizes} samples (choose one split by --split)")

    def read(rows: Sequence[int]) -> Sequence[Value]:
        file.seek(start + rows[0] * size)
        values = np.frombuffer(file.read(len(rows) * size), dtype).reshape(len(rows), *shape[1:])
        return [np.asarray(value) for value in values]  # a number is an array too

    return Values(identity, stat.num_bytes, "npy", read)


def _table(
    file: RangeFile, config: ColumnConfig
) -> tuple[str, Callable[[Sequence[int]], Sequence[Value]], dict[str, int]]:
    """Bytes, texts or lists of numbers by `key`; null is no value. The table is held in memory."""
    with parquet_errors(config.source):
        parquet = open_parquet(file, config.source)
        field = _field(config, [name for name in parquet.schema_arrow.names if name != "key"])
        table = parquet.read(["key", field])
    kind, column = str(table.schema.field(field).type), table.column(field).combine_chunks()
    extension = {"string": "txt", "binary": "bin"}.get(kind, "npy")
    if "key" not in table.column_names or (extension == "npy" and "list<" not in kind):
        raise refused(config, f"{kind} in {table.column_names} (expected key, and bytes, texts or lists of numbers)")

    def value(scalar: Any) -> Value:
        if not scalar.is_valid or extension != "npy":
            return scalar.as_buffer().to_pybytes() if scalar.is_valid else None
        return np.asarray(scalar.values.to_numpy(zero_copy_only=False))

    return extension, lambda rows: [value(column[row]) for row in rows], _rows(config, table.column("key").to_pylist())


def _tars(config: ColumnConfig) -> Values:
    """A field of another set, built or adopted, by key."""
    loaded = manifests.load(config.source)
    splits = loaded.manifest.splits
    if len(splits) > 1 and config.split not in splits:
        raise refused(config, f"the splits {', '.join(splits)} (choose one by --split)")
    split = config.split if config.split in splits else next(iter(splits))
    samples = SampleSet(loaded, split)
    field = _field(config, samples.split.fields)
    indexes = samples.table.indexes(range(samples.split.num_shards))
    keys = [key.decode("ascii") for index in indexes if index.keys is not None for key in index.keys.tolist()]
    extension = field.rpartition(".")[2]

    def value(content: bytes | None) -> Value:
        try:
            return np.lib.format.read_array(io.BytesIO(content)) if content and extension == "npy" else content
        except (ValueError, EOFError, MemoryError) as error:
            raise SourceError(f"{config.source}: a value is no NumPy array: {error}") from error

    def read(rows: Sequence[int]) -> Sequence[Value]:
        return [value(sample.fields.get(field) or None) for sample in samples.__getitems__(rows)]

    identity = loaded.manifest.digest, split, field
    return Values(identity, samples.split.num_tar_bytes, extension, read, _rows(config, keys))


def _field(config: ColumnConfig, names: Sequence[str]) -> str:
    if config.field not in names and (config.field or len(names) != 1):
        raise refused(config, f"{', '.join(names)} (choose one by --field)")
    return config.field or names[0]


def _rows(config: ColumnConfig, keys: Sequence[str]) -> dict[str, int]:
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < max(1, len(keys)):
        raise refused(config, "no row, or a key twice")
    return rows
