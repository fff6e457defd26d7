"""The catalogue of a shard set: beside each tar a Parquet file with a row for each sample, in the order of the tar.

It is made from the set, so it is in no digest. Its footer names the SHA-256 of its tar, its pages have checksums.
"""

import io
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from pipelines.images.open import opened
from pipelines.images.options import ImageOptions, options_to_read
from pipelines.report.catalog import rows_of_index
from shardset.errors import ConfigError, NotFound, UndecodableImage
from shardset.format import manifest as manifests
from shardset.format.images import format_of
from shardset.format.images.orientation import orientation_of, upright_size
from shardset.format.manifest import LoadedSet, Shard
from shardset.format.originals import read_origins
from shardset.read.indexes import read_index
from shardset.storage.base import Storage
from shardset.storage.checked import read_object

THREADS = 4
"""Each holds a whole tar."""

_FOOTER = b"shardset.catalog"
_UNREADABLE = (pa.ArrowException, OSError, ValueError)


def write_catalog(url: str) -> list[str]:
    """Writes the files that are missing or of other tars, each with one read of its tar; returns their paths.

    Raises ManifestError without a set, DamagedShard for a tar that is not that of the manifest.
    """
    loaded = manifests.load_whole(url)
    options = options_to_read(loaded.manifest)
    tasks = [(name, number) for name, split in loaded.manifest.splits.items() for number in range(split.num_shards)]
    with ThreadPoolExecutor(THREADS) as threads:
        written = threads.map(lambda task: _write(loaded, task[0], task[1], options), tasks)
        return [path for path in written if path is not None]


def read_catalog(loaded: LoadedSet, split: str) -> pa.Table:
    """The catalogue of a split of a whole set, by id; raises ConfigError where a file is missing or of another tar."""
    shards = loaded.manifest.split(split).shards
    with ThreadPoolExecutor(loaded.storage.reads_at_once) as threads:
        tables = list(threads.map(lambda shard: _read(loaded.storage, shard), shards))
    if missing := [shard.path for table, shard in zip(tables, shards, strict=True) if table is None]:
        raise ConfigError(
            f"{loaded.storage.url}/{missing[0]}: no catalogue of this tar is beside it; make it with `python -m "
            f"pipelines catalog {loaded.storage.url}`"
        )
    return pa.concat_tables([table for table in tables if table is not None], promote_options="permissive")


def _path(shard: Shard) -> str:
    return shard.path.removesuffix(".tar") + ".parquet"


def _read(storage: Storage, shard: Shard) -> pa.Table | None:
    """The stored rows of a shard; None if there are none, or of another tar."""
    try:
        file = parquet.ParquetFile(pa.BufferReader(storage.read(_path(shard))), page_checksum_verification=True)
        is_current = (file.metadata.metadata or {}).get(_FOOTER) == shard.sha256.encode()
        return file.read() if is_current else None
    except (NotFound, *_UNREADABLE):  # damage is repaired as absence is
        return None


def _write(loaded: LoadedSet, split: str, number: int, options: ImageOptions) -> str | None:
    """Writes the file of a shard and returns its path; None if it was there."""
    manifest, storage, _ = loaded
    shard = manifest.split(split).shards[number]
    if _read(storage, shard) is not None:
        return None
    index = read_index(storage, shard)
    tar = memoryview(
        read_object(storage, shard.path, shard.num_bytes, shard.crc32c, "rebuild the shard with --only-shards")
    )
    rows, keys, labels = rows_of_index(index, 0, shard.first_id), index["key"], index["label"].tolist()
    images = zip(rows["image_start"].tolist(), rows["image_bytes"].tolist(), strict=True)
    sizes = [_size(bytes(tar[start : start + size]), options) if size else (None, None) for start, size in images]
    origins = read_origins(storage, split, number, keys)
    names = [info.name for info in manifest.classes]
    columns: dict[str, Any] = {
        "id": shard.first_id + np.arange(len(index)),
        "key": keys.astype(str),
        "label": labels,
        "class": pa.array([names[label] if 0 <= label < len(names) else None for label in labels], pa.string()),
        "width": pa.array([width for width, _ in sizes], pa.int32()),
        "height": pa.array([height for _, height in sizes], pa.int32()),
        "bytes": rows["image_bytes"],
        "source": pa.array([origin.name for origin in origins] if origins else [None] * len(index), pa.string()),
    }
    if ".json" in (index.dtype.names or ()):
        places = index[".json"].tolist()
        objects = [_object(bytes(tar[start : start + size])) for start, size in places]
        columns |= {f"json.{name}" if name in columns else name: values for name, values in _scalars(objects)}
    table = pa.table(columns).replace_schema_metadata({_FOOTER: shard.sha256.encode()})
    out = io.BytesIO()
    parquet.write_table(table, out, compression="zstd", write_page_checksum=True)
    with storage.writer(_path(shard)) as file:
        file.write(out.getvalue())
    return _path(shard)


def _size(image: bytes, options: ImageOptions) -> tuple[int | None, int | None]:
    """(width, height) of an image once it is upright; Nones if it has no header."""
    try:
        with opened(image, format_of(image), options) as header:
            return upright_size(header.size, orientation_of(image, header))
    except UndecodableImage:
        return None, None


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _scalars(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[str, pa.Array]]:
    """A column for each printable name with texts, numbers and truth values, in the order of their first samples."""
    found = dict.fromkeys(name for each in objects for name, value in each.items() if _is_scalar(value))
    for name in filter(str.isprintable, found):
        values = [value if _is_scalar(value := each.get(name)) else None for each in objects]
        try:
            yield name, pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeError):  # texts and numbers under one name, half a character
            yield name, pa.array([None if value is None else _text(value) for value in values])


def _text(value: object) -> str:
    return str(value).encode("utf-8", "replace").decode()


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)
