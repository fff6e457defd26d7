"""Writes and reads the catalogue of a shard set, as `shardset.format.catalog` defines it."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from pipelines.images.check import examine
from pipelines.images.options import ImageOptions, options_to_read
from pipelines.plan.files import in_order
from pipelines.sources.formats.parquet import json_value
from shardset.errors import REPAIR, ConfigError, UndecodableImage
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.catalog import FOOTER, SCHEMA, read_names, read_rows
from shardset.format.images.orientation import upright_size
from shardset.format.index import first_images, index_fields
from shardset.format.manifest import LoadedSet, Shard
from shardset.format.parquet import table_to_bytes
from shardset.prepared import JSON_ERRORS
from shardset.read.indexes import read_index
from shardset.storage.checked import read_object

THREADS = 4
"""Each holds a complete tar."""


def write_catalog(url: str) -> list[str]:
    """Writes the files that are missing or of other tars, each with one read of its tar; returns
    their paths.

    Raises ManifestError without a set, DamagedShard for a tar that differs from the manifest.
    """
    loaded = manifests.load_whole(url)
    options = options_to_read(loaded.manifest)
    with ThreadPoolExecutor(THREADS) as threads:
        written = threads.map(lambda shard: _write(loaded, shard, options), loaded.manifest.shards)
        return [path for path in written if path is not None]


def read_catalog(loaded: LoadedSet, split: str) -> pa.Table:
    """The catalogue of a split of a whole set, by id; raises ConfigError where a file is missing or
    of another tar.
    """
    shards = loaded.manifest.split(split).shards
    tables = list(in_order(loaded.storage, shards, partial(read_rows, loaded.storage)))
    if missing := [
        shard.path for table, shard in zip(tables, shards, strict=True) if table is None
    ]:
        raise ConfigError(
            f"{loaded.storage.url}/{missing[0]}: no catalogue of this tar is beside it; make it"
            f" with `shardset catalog {loaded.storage.url}`"
        )
    return pa.concat_tables([table for table in tables if table is not None])


def _write(loaded: LoadedSet, shard: Shard, options: ImageOptions) -> str | None:
    """Writes the file of a shard and returns its path; None if it was there."""
    manifest, storage = loaded.manifest, loaded.storage
    if read_rows(storage, shard) is not None:
        return None
    index = read_index(storage, shard)
    tar = memoryview(read_object(storage, shard.path, shard.num_bytes, shard.crc32c, REPAIR))
    labels = index["label"].tolist()
    starts, lengths = first_images(index)
    sizes = [
        _size(bytes(tar[start : start + size]), options) if size else (None, None)
        for start, size in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    texts = index[".json"].tolist() if "json" in index_fields(index) else [(0, 0)] * len(index)
    widths, heights = zip(*sizes, strict=True)
    columns: dict[str, Any] = {
        "id": shard.first_id + np.arange(len(index)),
        "key": index["key"].astype(str),
        "label": labels,
        "class": [manifest.class_name(label) or None for label in labels],
        "width": widths,
        "height": heights,
        "bytes": lengths,
        "source": read_names(storage, shard, index["key"]) or [None] * len(index),
        "json": [
            _json(bytes(tar[start : start + size])) if size else None for start, size in texts
        ],
    }
    table = pa.table(columns, SCHEMA).replace_schema_metadata({FOOTER: shard.sha256.encode()})
    storage.write(naming.catalog_of(shard.path), table_to_bytes(table))
    return naming.catalog_of(shard.path)


def _size(image: bytes, options: ImageOptions) -> tuple[int | None, int | None]:
    """(width, height) of an image once it is upright; Nones if it has no header."""
    try:
        found = examine(image, field="", verify="header", options=options)
        return upright_size(found.size, found.orientation)
    except UndecodableImage:
        return None, None


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
