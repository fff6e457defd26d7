"""The catalogue of a shard: a Parquet file next to the tar with a row for each sample, in the order
of the tar.

It is made from the tar, so it is in no digest. Its footer names the SHA-256 of that tar, and its
pages have checksums. docs/how-to/select.md explains its columns.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from shardset.errors import ManifestError, NotFound
from shardset.format import naming
from shardset.format.manifest import Shard
from shardset.format.originals import read_origins
from shardset.format.parquet import open_table, parquet_errors
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice

FOOTER: Final = b"shardset.catalog"
SCHEMA: Final = pa.schema(
    {
        "id": "int64",
        "key": "string",
        "label": "int64",
        "class": "string",
        "width": "int32",
        "height": "int32",
        "bytes": "int64",
        "source": "string",
        "json": "string",
    }
)
"""The same for all tars, since programs read their files as one table."""


def read_rows(
    storage: Storage, shard: Shard, columns: Sequence[str] = SCHEMA.names
) -> pa.Table | None:
    """The rows of a shard; None if there are none, if they are damaged or of another tar."""

    def read() -> pa.Table:
        with parquet_errors(ManifestError):
            file = open_table(storage.read(naming.catalog_of(shard.path)))
            if (file.metadata.metadata or {}).get(FOOTER) != shard.sha256.encode():
                raise ManifestError("of another tar")
            rows = file.read(columns=[*columns]).cast(pa.schema(map(SCHEMA.field, columns)))
            rows.validate(full=True)  # its texts are UTF-8
            return rows

    try:
        rows = read_twice(read, error=ManifestError)
    except (NotFound, ManifestError):  # damage is repaired as absence is
        return None
    return rows if len(rows) == shard.num_samples else None


def read_names(
    storage: Storage, shard: Shard, keys: np.ndarray | None, positions: Sequence[int] | None = None
) -> list[str] | None:
    """The names in the raw input of a shard's samples, or of the ones at `positions`.

    By the plan, as `read_origins` reads it with `keys`; where that is gone, by the catalogue; None
    if neither has them.
    """
    origins = read_origins(storage, shard.path, keys, positions)
    if origins is not None:
        return [origin.name for origin in origins]
    rows = read_rows(storage, shard, ["source"])
    if rows is None or rows["source"].null_count:
        return None
    names: list[str] = rows["source"].to_pylist()
    return names if positions is None else [names[position] for position in positions]
