"""timm: `_info.json`, from which `timm.data.create_dataset("wds/...")` takes the names and counts of shards."""

from collections.abc import Iterator

from pipelines.export.base import Format, ShardSet, SideFile, json_bytes
from shardset.errors import ConfigError
from shardset.format.manifest import Manifest, Split


def files(found: ShardSet) -> Iterator[SideFile]:
    """`_info.json`, from the manifest alone."""
    splits = {name: _split(found, name, split) for name, split in found.manifest.splits.items()}
    yield SideFile("_info.json", json_bytes({"splits": splits}))


def check(manifest: Manifest) -> None:
    """timm takes a split's name for a list of tars if `tar` is in it."""
    for name in manifest.splits:
        if "tar" in name:
            raise ConfigError(f"timm takes the split name {name!r} for a tar's, because of its 'tar'; rename the split")


def _split(found: ShardSet, name: str, split: Split) -> dict:
    return {
        "name": name,
        "num_samples": split.num_samples,
        "filenames": [found.address(shard) for shard in split.shards],
        "shard_lengths": [shard.num_samples for shard in split.shards],
    }


TIMM = Format(place="relative", files=files, check=check)
