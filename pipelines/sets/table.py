"""The samples of a split as one table, by id, from the indexes of its shards."""

import json
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from pipelines.plan.files import in_order
from pipelines.sources.formats.parquet import json_value
from shardset.format.manifest import LoadedSet, Shard
from shardset.format.rows import FACTS, first_images, numbers, ranges_of
from shardset.prepared import JSON_ERRORS
from shardset.read.indexes import read_index


def samples_table(loaded: LoadedSet, split: str, *, with_json: bool = False) -> pa.Table:
    """The rows of a split of a whole set: `id`, `label`, `class`, `bytes` of the image, and the
    facts of the indexes; on request `json`, each read from its tar, null where it is not JSON.

    Raises DamagedShard for an index that differs from the manifest.
    """
    shards = loaded.manifest.split(split).shards
    tables = in_order(loaded.storage, shards, partial(_table, loaded, with_json=with_json))
    return pa.concat_tables(tables)


def _table(loaded: LoadedSet, shard: Shard, *, with_json: bool) -> pa.Table:
    index = read_index(loaded.storage, shard)
    labels = numbers(index, "label").tolist()
    class_name = loaded.manifest.class_name
    columns = {
        "id": shard.first_id + np.arange(len(index)),
        "label": index["label"],
        "class": pa.array([class_name(label) or None for label in labels], pa.string()),
        "bytes": first_images(index)[1],
        **{name: index[name] for name in FACTS},
    }
    if with_json:
        columns["json"] = pa.array(_jsons(loaded, shard, index), pa.string())
    return pa.table(columns)


def _jsons(loaded: LoadedSet, shard: Shard, index: pa.Table) -> Iterator[str | None]:
    starts, sizes = (part.tolist() for part in ranges_of(index, "json"))
    ranges = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def text(of: tuple[int, int]) -> str | None:
        start, stop = of
        return _json(loaded.storage.read(shard.path, start, stop)) if stop > start else None

    return in_order(loaded.storage, ranges, text)


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
