"""What samples were called in the raw input: the plan beside a manifest knows, as long as it is kept."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from shardset import naming
from shardset.errors import DamagedShard, NotFound
from shardset.storage import Storage


def read_names(
    storage: Storage, split: str, number: int, keys: np.ndarray, positions: Sequence[int] | None = None
) -> list[str] | None:
    """The original names of a shard's samples; None if the plan is gone or speaks of other keys.

    With `positions`, of these alone; `keys` are theirs then.
    """
    table = read_references(storage, split, number)
    if table is None or (positions and max(positions) >= len(table)):
        return None
    rows = table if positions is None else table.take(pa.array(positions, pa.int64()))
    if rows["key"].to_pylist() != [key.decode("ascii", "replace") for key in keys.tolist()]:
        return None
    return rows["name"].to_pylist()


def read_references(
    storage: Storage, split: str, number: int, columns: Sequence[str] = ("key", "name")
) -> pa.Table | None:
    """The plan of one shard, a row for each sample in position order; None if there is no plan."""
    path = naming.references_path(split, number)
    try:
        data = storage.read(path)
    except NotFound:
        return None
    try:
        schema = pa.ipc.open_file(pa.BufferReader(data)).schema
        wanted = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in columns])
        return pa.ipc.open_file(pa.BufferReader(data), options=wanted).read_all().select(list(columns))
    except (pa.ArrowInvalid, pa.ArrowKeyError, KeyError, OSError) as error:
        raise DamagedShard(f"{storage.url}/{path}: not a plan of a shard; remove it or build again") from error
