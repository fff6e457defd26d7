"""Pure: the samples of each class, and how evenly the shards mix the classes."""

import numpy as np

from shardset.format.manifest import Manifest, Split


def class_counts(split: Split) -> list[int]:
    """Samples of each class in a split, by label; empty if the set has no classes."""
    return (
        np.sum([shard.class_counts for shard in split.shards], axis=0).tolist() if split.shards[0].class_counts else []
    )


def class_name(manifest: Manifest, label: int) -> str:
    """The name of a class, or `no label`."""
    return manifest.classes[label].name if 0 <= label < len(manifest.classes) else "no label"


def mixing_rows(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """For each split: the largest difference between a shard's samples of a class and its even share, and where."""
    rows = []
    for name, split in manifest.splits.items():
        total = np.array(class_counts(split), float)
        if not len(total):
            continue
        counts = np.array([shard.class_counts for shard in split.shards], float)
        sizes = np.array([shard.num_samples for shard in split.shards], float)
        off = np.abs(counts - np.outer(sizes, total / max(1, split.num_samples)))
        shard, label = map(int, np.unravel_index(int(off.argmax()), off.shape))
        rows.append((name, f"{off[shard, label]:.1f}", class_name(manifest, label), split.shards[shard].path))
    return rows
