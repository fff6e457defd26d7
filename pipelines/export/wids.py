"""wids: a list of shards with sizes and MD5 sums for each split, for random access by `wids.ShardListDataset`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from pipelines.export.base import ShardSet, SideFile, SideFormat, json_bytes, md5_of

THREADS = 8


def files(shard_set: ShardSet) -> Iterator[SideFile]:
    """`wids-SPLIT.json` for each split; reads every tar once, because the manifest holds no MD5."""
    with ThreadPoolExecutor(THREADS) as threads:
        for name, split in shard_set.manifest.splits.items():
            sums = threads.map(lambda shard: md5_of(shard_set.storage, shard), split.shards)
            shards = [
                {
                    "url": shard_set.address(shard),
                    "nsamples": shard.num_samples,
                    "md5sum": md5,
                    "filesize": shard.num_bytes,
                }
                for shard, md5 in zip(split.shards, sums, strict=True)
            ]
            index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": name, "shardlist": shards}
            yield SideFile(f"wids-{name}.json", json_bytes(index))


WIDS = SideFormat(location="anywhere", files=files)
