"""`dataset_info.json` in the fields of TensorFlow Datasets, for tools that take names and counts from there.

TensorFlow Datasets itself opens TFRecord, Riegeli, ArrayRecord and Parquet files, no tars.
"""

from collections.abc import Iterator
from typing import Any

from pipelines.export.base import ShardSet, SideFile, SideFormat, json_bytes
from shardset.errors import ConfigError
from shardset.format.manifest import Manifest, Split

_MOST_SHARDS = 99_999
"""`{SHARD_INDEX}` has five digits up to here, six above; the names of our shards always have six."""


def files(shard_set: ShardSet) -> Iterator[SideFile]:
    """`dataset_info.json`, from the manifest alone."""
    manifest = shard_set.manifest
    info = {
        "name": manifest.provenance.source,
        "version": "1.0.0",
        "description": f"WebDataset shards, manifest {manifest.digest}",
        "splits": [_split(shard_set, name, split) for name, split in manifest.splits.items()],
    }
    yield SideFile("dataset_info.json", json_bytes(info))


def check(manifest: Manifest) -> None:
    """The file name template of tfds numbers shards from 0."""
    for name, split in manifest.splits.items():
        expected = [f"{_stem(split)}{number:06d}.tar" for number in range(split.num_shards)]
        if [shard.path for shard in split.shards] != expected:
            raise ConfigError(f"the shards of split {name!r} are not numbered 0 to {split.num_shards - 1} in order")
        if split.num_shards > _MOST_SHARDS:
            raise ConfigError(f"split {name!r} has {split.num_shards} shards, but tfds numbers at most {_MOST_SHARDS}")


def _stem(split: Split) -> str:
    return split.shards[0].path.removesuffix("000000.tar")


def _split(shard_set: ShardSet, name: str, split: Split) -> dict[str, Any]:
    return {
        "name": name,
        # 64-bit numbers are strings in the JSON form of a protocol buffer.
        "numBytes": str(split.num_content_bytes),
        "shardLengths": [*map(str, split.shard_sizes)],
        "filepathTemplate": f"{shard_set.prefix}{_stem(split)}0{{SHARD_INDEX}}.tar",
    }


TFDS = SideFormat(location="relative", files=files, check=check)
