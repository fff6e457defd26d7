"""What samples were called in the raw input: the plan beside a manifest knows, as long as it is kept."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from shardset.errors import DamagedShard, NotFound
from shardset.format import arrow, naming
from shardset.format.frame import NUM_BYTES, has_frame
from shardset.storage.base import Storage

REFERENCE = pa.schema([("row", pa.binary()), ("twin", pa.int32()), ("source", pa.int64()), ("copy", pa.int32())])
"""One stored sample of a shard's plan: its raw sample as MessagePack (it starts with an Origin), how many others wanted
its key before it, its number in the split's raw samples, and which copy of it this is."""


class Origin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a raw sample is called and which key it wants; `fix` is what is mended in its image, "" if nothing."""

    split: str
    name: str
    key: str
    fix: str


_decode = msgspec.msgpack.Decoder(Origin).decode


def stored_key(origin: Origin, twin: int, copy: int) -> str:
    """The key of a stored sample: the wanted one, or a short one where that can't be a key or others have it.

    The short one is made of name and wanted key: a name may be that of several samples, each with a key of its own.
    """
    stays = not twin and naming.is_key(origin.key)
    key = origin.key if stays else naming.short_key(f"{origin.split}/{origin.name}\0{origin.key}", twin)
    return naming.copy_key(key, copy)


def read_origins(
    storage: Storage, split: str, number: int, keys: np.ndarray | None, positions: Sequence[int] | None = None
) -> list[Origin] | None:
    """What the samples of a shard were, by the plan of it; None if that is gone or speaks of other keys.

    With `positions`, of these alone; `keys` are theirs then, None: not compared. Raises DamagedShard if something
    else stands in its place.
    """
    path = naming.references_path(split, number)
    try:
        data = storage.read(path)
    except NotFound:
        return None
    try:
        table = arrow.from_bytes(memoryview(data)[: -NUM_BYTES if has_frame(data) else None], REFERENCE)
    except ValueError as error:
        raise DamagedShard(
            f"{storage.url}/{path}: not a plan of a shard ({error}); remove it or build again"
        ) from error
    if positions is not None:
        if max(positions, default=-1) >= len(table):
            return None
        table = table.take(pa.array(positions, pa.int64()))
    origins = list(map(_decode, table["row"].to_pylist()))
    if keys is None:
        return origins
    stored = list(map(stored_key, origins, table["twin"].to_pylist(), table["copy"].to_pylist()))
    return origins if stored == [key.decode("ascii", "replace") for key in keys.tolist()] else None
