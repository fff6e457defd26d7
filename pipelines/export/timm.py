"""timm: `_info.json`, from which `timm.data.create_dataset("wds/...")` takes the names and counts of shards."""

from collections.abc import Iterator

from pipelines.export.base import ShardSet, SideFile, SideFormat, json_bytes
from shardset.errors import ConfigError
from shardset.format.manifest import Manifest


def files(shard_set: ShardSet) -> Iterator[SideFile]:
    """`_info.json`, from the manifest alone."""
    splits = {
        name: {
            "name": name,
            "num_samples": split.num_samples,
            "filenames": [shard_set.address(shard) for shard in split.shards],
            "shard_lengths": split.shard_sizes,
        }
        for name, split in shard_set.manifest.splits.items()
    }
    yield SideFile("_info.json", json_bytes({"splits": splits}))


def check(manifest: Manifest) -> None:
    """timm mistakes a split name with `tar` in it for a list of tars."""
    for name in manifest.splits:
        if "tar" in name:
            raise ConfigError(
                f"timm mistakes the split name {name!r} for a tar, because it contains 'tar'; rename the split"
            )


TIMM = SideFormat(location="relative", files=files, check=check)
