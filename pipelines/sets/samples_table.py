"""The samples of a split as one table, by id, from the indexes of its shards."""

import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from pipelines.sources.formats.parquet import json_value
from shardset.format.columns import BATCH_NAMES, StoredColumn, open_column
from shardset.format.manifest import LoadedSet, Shard
from shardset.format.naming import COLUMNS_FOLDER, MANIFEST, is_field
from shardset.format.rows import FACTS, first_images, numbers, ranges_of
from shardset.prepared import JSON_ERRORS
from shardset.read.query import samples_of_shard, values_of
from shardset.storage.base import stat_or_none
from shardset.storage.many import in_order


def samples_table(
    loaded: LoadedSet,
    split: str,
    wanted: Collection[str] = (),
    facts: Collection[str] = tuple(FACTS),
) -> pa.Table:
    """The rows of a split of a complete set: `id`, `label`, `class`, `bytes` of the image, and
    facts of the indexes; if wanted also `json`, null where it is not JSON, and the columns of the
    set that have a wanted name.

    Raises DamagedShard for a file that differs from the manifest.
    """
    columns = [
        open_column(loaded, split, name)
        for name in sorted({*wanted} - {"id", "class", "bytes", "json", *FACTS} - BATCH_NAMES)
        if is_field(name) and stat_or_none(loaded.storage, f"{COLUMNS_FOLDER}{name}/{MANIFEST}")
    ]
    shards = range(loaded.manifest.split(split).num_shards)
    rows = partial(_rows, loaded, split, columns, facts, with_json="json" in wanted)
    return pa.concat_tables(in_order(loaded.storage.reads_at_once, shards, rows))


def _rows(
    loaded: LoadedSet,
    split: str,
    columns: Sequence[StoredColumn],
    facts: Collection[str],
    number: int,
    *,
    with_json: bool,
) -> pa.Table:
    index = samples_of_shard(loaded, split, None, number)
    labels = numbers(index, "label").tolist()
    class_name = loaded.manifest.class_name
    arrays = {
        "id": index["id"],
        "label": index["label"],
        "class": pa.array([class_name(label) or None for label in labels], pa.string()),
        "bytes": first_images(index)[1],
        **{name: index[name] for name in facts},
        **{column.name: _values(column, number, index) for column in columns},
    }
    if with_json:
        shard = loaded.manifest.split(split).shards[number]
        arrays["json"] = pa.array(_jsons(loaded, shard, index), pa.string())
    return pa.table(arrays)


def _values(column: StoredColumn, number: int, index: pa.Table) -> pa.Array:
    """The values of a shard, null for samples without one: numbers, lists, texts or bytes."""
    positions = numbers(index, "position")
    contents = [content or None for content in values_of(column, number, positions)]
    if column.missing is None and column.split.fields[0].endswith(".txt"):
        return pa.array(
            [content and content.decode("utf-8", "replace") for content in contents], pa.string()
        )
    if column.missing is None:
        return pa.array(contents, pa.binary())
    dtype = column.missing.dtype
    kind = pa.from_numpy_dtype(np.float32 if dtype == np.float16 else dtype)  # DuckDB has no half
    for _ in column.missing.shape:
        kind = pa.list_(kind)
    values = [content and column.value(content).tolist() for content in contents]
    return pa.array(values, kind, from_pandas=True)  # NaN is null, as DuckDB takes it for large


def _jsons(loaded: LoadedSet, shard: Shard, index: pa.Table) -> Iterator[str | None]:
    starts, sizes = (part.tolist() for part in ranges_of(index, "json"))
    ranges = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def text(byte_range: tuple[int, int]) -> str | None:
        start, stop = byte_range
        return _json(loaded.storage.read(shard.path, start, stop)) if stop > start else None

    return in_order(loaded.storage.reads_at_once, ranges, text)


def _json(text: bytes) -> str | None:
    """The text, None if it is not JSON.

    As the build, it takes NaN, Infinity, UTF-16 and a byte order mark; those it writes as JSON has
    them: null, and ASCII.
    """
    try:
        msgspec.json.decode(text)
        return text.decode()
    except JSON_ERRORS:
        pass
    try:
        return json.dumps(json_value(json.loads(text)))
    except (ValueError, RecursionError):
        return None
