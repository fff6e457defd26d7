"""The values of a column where somebody has written them: a NumPy array, a Parquet file,
or tars.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.config import ColumnConfig
from pipelines.sources.formats.parquet import open_parquet, parquet_errors
from pipelines.sources.formats.range_file import RangeFile
from shardset.errors import DOCS, ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.storage.open import open_file
from shardset.stream.samples import SampleSet

Value = NDArray[Any] | bytes | None
Read = Callable[[Sequence[int]], Sequence[Value]]

_VALUES = re.compile(r"string|binary|list|bool|u?int\d+|(half)?float|double", re.ASCII)
"""The types of a Parquet column, without sizes, that can be values."""

_PARSING = Lock()
"""NumPy parses headers as Python, which CPython 3.11 now and then fails to do while another thread
does the same.
"""


class Values(NamedTuple):
    """Values of samples: arrays, which are `npy`, or bytes with another extension.

    `identity` changes with them.

    `read` gives the values in some rows. A sample's row is the one of its key in `rows`, or else
    with its id.
    """

    identity: Sequence[str]
    num_bytes: int
    extension: str
    read: Read
    rows: dict[str, int] | None = None

    def values_of(self, keys: Sequence[str], first_id: int) -> Sequence[Value]:
        """The values of neighbouring samples, None for one without; raises SourceError."""
        if self.rows is None:
            return self.read(range(first_id, first_id + len(keys)))
        rows = [self.rows[key] for key in keys if key in self.rows]
        values = dict(zip(rows, self.read(rows), strict=True))
        return [values.get(self.rows.get(key, -1)) for key in keys]


def refused(config: ColumnConfig, content: object) -> ConfigError:
    """The error for values that can't make a column."""
    return ConfigError(
        f"{config.source}: holds {content}, which can't be the values of a column; see"
        f" {DOCS}/how-to/columns.md"
    )


def open_values(config: ColumnConfig, split_sizes: Sequence[int]) -> Values:
    """The values for splits of so many samples; raises ConfigError or SourceError for what can't be
    theirs.
    """
    if not config.source.endswith((".npy", ".parquet")):
        return _tars(config)
    storage, name = open_file(config.source)
    stat = storage.stat(name)
    file, identity = RangeFile(storage, stat), (config.source, stat.generation)
    if name.endswith(".parquet"):
        return Values(identity, stat.num_bytes, *_table(file, config))
    try:
        np.lib.format.read_magic(file)
        with _PARSING:
            shape, is_transposed, dtype = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        raise SourceError(
            f"{config.source}: not a NumPy file of version 1.0 ({error}); write it again"
        ) from error
    start, size = file.tell(), dtype.itemsize * math.prod(shape[1:])
    if [*split_sizes] != [*shape[:1]] or is_transposed or stat.num_bytes != start + shape[0] * size:
        order = "Fortran" if is_transposed else "C"
        form = f"{dtype} {shape} in {order} order, {stat.num_bytes} bytes"
        raise refused(config, f"{form}, for {split_sizes} samples (choose one split by --split)")

    def read(rows: Sequence[int]) -> Sequence[Value]:
        opened = RangeFile(storage, stat)  # threads of a worker read at once
        opened.seek(start + rows[0] * size)
        values = np.frombuffer(opened.read(len(rows) * size), dtype).reshape(len(rows), *shape[1:])
        return [np.asarray(value) for value in values]  # a number is an array too

    return Values(identity, stat.num_bytes, "npy", read)


def _table(file: RangeFile, config: ColumnConfig) -> tuple[str, Read, dict[str, int]]:
    """Bytes, texts, numbers or lists of them by `key`; null isn't a value. The table stays in
    memory.
    """
    with parquet_errors(config.source):
        table = open_parquet(file, config.source).read()
        names = [name for name in table.column_names if name != "key"]
        column = table.column(names[0] if names else 0).combine_chunks()
        if pa.types.is_dictionary(column.type):  # such as a categorical of pandas
            column = column.cast(column.type.value_type)
    kind = re.sub(r"large_|fixed_size_|_view|[<[].*", "", str(column.type))
    extension = {"string": "txt", "binary": "bin"}.get(kind, "npy")
    if len(names) != 1 or table.num_columns != 2 or not _VALUES.fullmatch(kind):
        types = dict(zip(table.column_names, map(str, table.schema.types), strict=True))
        raise refused(
            config, f"{types} (expected a column key and one of bytes, texts, numbers or lists)"
        )

    def value(scalar: Any) -> Value:
        if not scalar.is_valid:
            return None
        if extension != "npy":
            return bytes(scalar.as_buffer())
        if kind != "list":
            return np.asarray(scalar.as_py(), column.type.to_pandas_dtype())
        return np.asarray(scalar.values.to_numpy(zero_copy_only=False))

    return (
        extension,
        lambda rows: [value(column[row]) for row in rows],
        _rows(config, table.column("key").to_pylist()),
    )


def _tars(config: ColumnConfig) -> Values:
    """A field of another set, built or adopted, by key."""
    loaded = manifests.load(config.source)
    fields = {
        (name, field) for name, split in loaded.manifest.splits.items() for field in split.fields
    }
    if len(fields) > 1:
        raise refused(config, f"the splits and fields {sorted(fields)} (expected one)")
    [(split, field)] = fields
    samples = SampleSet(loaded, split)
    keys = [key.decode("ascii") for key in samples.table.keys().tolist()]
    extension = field.rpartition(".")[2]

    def value(content: bytes | None) -> Value:
        if not content or extension != "npy":
            return content
        try:
            with _PARSING:
                return np.lib.format.read_array(io.BytesIO(content))
        except (ValueError, EOFError, MemoryError) as error:
            raise SourceError(f"{config.source}: a value is no NumPy array: {error}") from error

    def read(rows: Sequence[int]) -> Sequence[Value]:
        return [value(sample.fields.get(field) or None) for sample in samples.__getitems__(rows)]

    return Values(
        [loaded.manifest.digest], samples.split.num_tar_bytes, extension, read, _rows(config, keys)
    )


def _rows(config: ColumnConfig, keys: Sequence[str]) -> dict[str, int]:
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < max(1, len(keys)):
        raise refused(config, "no row, or a key twice")
    return rows
