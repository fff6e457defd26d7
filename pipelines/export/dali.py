"""NVIDIA DALI: one text index beside each tar, as DALI's `wds2idx` writes it, for `fn.readers.webdataset`."""

from collections.abc import Iterator

import numpy as np

from pipelines.export.base import ShardSet, SideFile, SideFormat, components
from shardset.read.indexes import read_index

VERSION = "v1.2"


def files(shard_set: ShardSet) -> Iterator[SideFile]:
    """`SPLIT/SPLIT-000000.idx` for each tar; reads the indexes."""
    for shard in shard_set.shards():
        yield SideFile(
            shard.path.removesuffix(".tar") + ".idx", text(read_index(shard_set.storage, shard), shard.index.path)
        )


def text(index: np.ndarray, where: str) -> bytes:
    """`v1.2 SAMPLES`, then one line a sample: `FIELD OFFSET BYTES NAME` for each of its members."""
    lines = [f"{VERSION} {len(index)}"]
    for key, members in components(index, where):
        lines.append(" ".join(f"{field} {offset} {size} {key}.{field}" for field, offset, size in members))
    return ("\n".join(lines) + "\n").encode("ascii")


DALI = SideFormat(location="anywhere", files=files)
