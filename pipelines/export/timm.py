"""timm: `_info.json`, from which `timm.data.create_dataset("wds/...")` takes the names and counts of shards."""

from collections.abc import Iterator

from pipelines.export.base import ShardSet, SideFile, SideFormat, json_bytes
from shardset.errors import ConfigError
from shardset.format.images import IMAGE_FIELDS
from shardset.format.manifest import Manifest

READ = ("jpg", "png", "webp")
"""The fields that its reader takes images from. It skips a sample without one of them, or without a label."""


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
    """timm mistakes a split name with `tar` in it for a list of tars, and skips what it can't read without a word."""
    for name, split in manifest.splits.items():
        if "tar" in name:
            raise ConfigError(
                f"timm mistakes the split name {name!r} for a tar, because it contains 'tar'; rename the split"
            )
        images = sorted(IMAGE_FIELDS.intersection(split.fields))
        if not images or not set(READ).issuperset(images):
            raise ConfigError(
                f"split {name!r} has images as {', '.join(images) or 'no known field'}; timm reads {', '.join(READ)} "
                "and would skip the others; build the set with --image-format png, which re-encodes them"
            )
        if num_unlabelled := split.num_samples - sum(split.class_totals):
            raise ConfigError(
                f"split {name!r} has {num_unlabelled} of {split.num_samples} samples without a label, which timm would "
                "skip; build a set of labelled samples for it"
            )


TIMM = SideFormat(location="relative", files=files, check=check)
