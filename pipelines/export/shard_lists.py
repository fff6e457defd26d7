"""Lists of shards with their sizes, from the manifest alone: of wids and of timm.

wids takes `wids-SPLIT.json` for random access by `wids.ShardListDataset`, which compares no MD5, so
none is listed. timm takes `_info.json`, from which `timm.data.create_dataset("wds/...")` has the
names and counts of shards.
"""

from collections.abc import Iterator

from pipelines.export.base import ShardSet, SideFile, SideFormat, json_bytes
from shardset.errors import ConfigError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.manifest import Manifest

READ = ("jpg", "png", "webp")
"""The fields that timm's reader takes images from.

It skips a sample without one of them, or without a label.
"""


def wids_files(shard_set: ShardSet) -> Iterator[SideFile]:
    """`wids-SPLIT.json` for each split."""
    for name, split in shard_set.manifest.splits.items():
        shards = [
            {
                "url": shard_set.address(shard),
                "nsamples": shard.num_samples,
                "filesize": shard.num_bytes,
            }
            for shard in split.shards
        ]
        index = {
            "__kind__": "wids-shard-index-v1",
            "wids_version": 1,
            "name": name,
            "shardlist": shards,
        }
        yield SideFile(f"wids-{name}.json", json_bytes(index))


def timm_files(shard_set: ShardSet) -> Iterator[SideFile]:
    """`_info.json`."""
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


def check_timm(manifest: Manifest) -> None:
    """timm mistakes a split name with `tar` in it for a list of tars, and skips what it can't read
    without a word.
    """
    for name, split in manifest.splits.items():
        if "tar" in name:
            raise ConfigError(
                f"timm mistakes the split name {name!r} for a tar, because it contains 'tar';"
                " rename the split"
            )
        images = sorted(FIELD_OF_EXTENSION.keys() & split.fields)
        if not images or not set(READ).issuperset(images):
            raise ConfigError(
                f"split {name!r} has images as {', '.join(images) or 'no known field'}; timm reads"
                f" {', '.join(READ)} and would skip the others; build the set with --image-format"
                " png, which re-encodes them"
            )
        if num_unlabelled := split.num_samples - sum(split.class_totals):
            raise ConfigError(
                f"split {name!r} has {num_unlabelled} of {split.num_samples} samples without a"
                " label, which timm would skip; build a set of labelled samples for it"
            )


WIDS = SideFormat(files=wids_files, takes=("relative paths", "URLs"))
TIMM = SideFormat(files=timm_files, takes=("relative paths",), check=check_timm)
