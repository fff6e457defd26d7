"""Pure: the samples of each class, and how evenly the shards mix the classes."""

import numpy as np

from shardset.format.manifest import Manifest


def class_name(manifest: Manifest, label: int) -> str:
    """The name of a class, or `no label`."""
    return manifest.classes[label].name if 0 <= label < len(manifest.classes) else "no label"


def mixing_rows(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """For each split: the largest difference between a shard's samples of a class and its even share, and where."""
    rows = []
    for name, split in manifest.splits.items():
        share = np.array(split.class_totals, float) / max(1, split.num_samples)
        if not len(share):
            continue
        sizes, first, found = np.array(split.shard_sizes, float), 0, []
        for counts in split.count_blocks():
            off = np.abs(counts - np.outer(sizes[first : first + len(counts)], share))
            shard, label = map(int, np.unravel_index(int(off.argmax()), off.shape))
            found.append((off.item(shard, label), first + shard, label))
            first += len(counts)
        largest, shard, label = max(found, key=lambda each: each[0])
        rows.append((name, f"{largest:.1f}", class_name(manifest, label), split.shards[shard].path))
    return rows
