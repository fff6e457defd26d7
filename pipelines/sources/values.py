"""The values of a column where somebody has written them: a NumPy array, a Parquet file, or tars."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Values:
    """Values of samples: arrays, which are `npy`, or bytes with another extension. `identity` changes with them.

    `read` gives those in some rows. A row is that of the sample with its key in `keys`, or else with its id.
    """

    where: str
    identity: Sequence[str]
    num_bytes: int
    extension: str
    read: Callable[[Sequence[int]], Sequence[Value]]
    keys: dict[str, int] | None = None

    def of(self, keys: Sequence[str], first_id: int) -> list[Value]:
        """The values of neighbouring samples, None for one without; raises SourceError."""
        if self.keys is None:
            return [*self.read(range(first_id, first_id + len(keys)))]
        rows = [self.keys.get(key, -1) for key in keys]
        known = [row for row in rows if row >= 0]
        found = dict(zip(known, self.read(known), strict=True))
        return [found.get(row) for row in rows]


def refused(where: str, found: str) -> ConfigError:
    """The error for values that can't make a column."""
    return ConfigError(f"{where}: holds {found}, which can't be the values of a column; see docs/columns.md")


def open_values(config: ColumnConfig, split_sizes: Sequence[int]) -> Values:
    """The values for splits of so many samples; raises ConfigError or SourceError for what can't be theirs."""
    if not config.source.endswith((".npy", ".parquet")):
        return _tars(config)
    storage, name = open_file(config.source)
    stat = storage.stat(name)
    file, identity = RangeFile(storage, stat, twice=True), [config.source, stat.generation, config.field or ""]
    if not name.endswith(".npy"):
        return _table(file, config, identity)
    try:
        np.lib.format.read_magic(file)
        shape, is_transposed, dtype = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        raise SourceError(
            f"{config.source}: not a NumPy file of version 1.0 ({error}); save it by numpy.save"
        ) from error
    start, size = file.tell(), dtype.itemsize * math.prod(shape[1:])
    if [*split_sizes] != [*shape[:1]] or is_transposed or stat.num_bytes != start + shape[0] * size:
        order = "Fortran" if is_transposed else "C"
        found = f"{shape} in {order} order and {stat.num_bytes} bytes for {split_sizes} samples (choose one by --split)"
        raise refused(config.source, found)

    def read(rows: Sequence[int]) -> Sequence[Value]:
        file.seek(start + rows[0] * size)
        return [*np.frombuffer(file.read(len(rows) * size), dtype).reshape(len(rows), *shape[1:])]

    return Values(where=config.source, identity=identity, num_bytes=stat.num_bytes, extension="npy", read=read)


def _table(file: RangeFile, config: ColumnConfig, identity: Sequence[str]) -> Values:
    """Bytes, texts or lists of numbers by `key`; null is no value. The table is held in memory."""
    parquet = open_parquet(file, config.source)
    names = parquet.schema_arrow.names
    fields = [config.field] if config.field else [name for name in names if name != "key"]
    if "key" not in names or len(fields) != 1 or fields[0] not in names:
        raise refused(config.source, f"the columns {', '.join(names)} (expected key and one more, or --field)")
    with parquet_errors(config.source):
        table = parquet.read(["key", *fields])
    kind, column = table.schema.field(fields[0]).type, table.column(fields[0]).combine_chunks()
    is_list, is_text = hasattr(kind, "value_type"), str(kind) == "string"

    def value(scalar: Any) -> Value:
        if not scalar.is_valid:
            return None
        if is_list:
            return np.asarray(scalar.values.to_numpy(zero_copy_only=False))
        content = scalar.as_py()
        return content.encode() if is_text else content

    if not is_list and not is_text and str(kind) != "binary":
        raise refused(config.source, f"values of type {kind} (expected bytes, texts or lists of numbers)")
    return Values(
        where=config.source, identity=identity, num_bytes=table.nbytes, keys=_rows(config, table.column("key").to_pylist()),
        extension="npy" if is_list else "txt" if is_text else "bin", read=lambda rows: [value(column[row]) for row in rows],
    )  # fmt: skip


def _tars(config: ColumnConfig) -> Values:
    """A field of another set, built or adopted, by key."""
    loaded = manifests.load(config.source)
    splits = loaded.manifest.splits
    split = config.split if config.split in splits else next(iter(splits))
    samples = SampleSet(loaded, split)
    names = samples.split.fields
    fields = [config.field] if config.field else names
    if len(fields) != 1 or fields[0] not in names or (len(splits) > 1 and split != config.split):
        found = f"{len(splits)} splits and the fields {', '.join(names)}"
        raise refused(config.source, f"{found} (needs one, or --split and --field)")
    indexes = samples.table.indexes(range(samples.split.num_shards))
    keys = [key.decode("ascii") for index in indexes if index.keys is not None for key in index.keys.tolist()]
    extension = fields[0].rpartition(".")[2]

    def value(content: bytes | None) -> Value:
        return content if extension != "npy" or not content else _array(content, config.source)

    return Values(
        where=config.source, identity=[loaded.manifest.digest, split, *fields], num_bytes=samples.split.num_tar_bytes,
        extension=extension, keys=_rows(config, keys),
        read=lambda rows: [value(sample.fields.get(fields[0])) for sample in samples.__getitems__(rows)],
    )  # fmt: skip


def _array(content: bytes, where: str) -> NDArray[Any]:
    try:
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, MemoryError, OverflowError) as error:
        raise SourceError(f"{where}: a value is no NumPy array: {error}") from error


def _rows(config: ColumnConfig, keys: Sequence[str]) -> dict[str, int]:
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < max(1, len(keys)):
        raise refused(config.source, "no row, or a key twice")
    return rows
