"""Totals of a split's samples, counted one by one or from their mean size."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelines.plan.index import fields_of
from pipelines.sources.base import Extent, RawSample
from shardset.format import naming
from shardset.format.tar import BLOCK


@dataclass(slots=True)
class SplitStats:
    """Totals of some samples. `tar_bytes` has headers and padding, not the end of a tar; `strata` counts labels."""

    num_samples: int = 0
    num_bytes: int = 0
    tar_bytes: int = 0
    key_bytes: int = 0
    fields: dict[str, None] = field(default_factory=dict)
    strata: Counter[int] = field(default_factory=Counter)

    def add(self, sample: RawSample) -> None:
        """Counts one more sample."""
        sizes = {
            name: content.num_bytes if isinstance(content, Extent) else len(content)
            for name, content in fields_of(sample)
        }
        self.num_samples += 1
        self.num_bytes += sum(sizes.values())
        self.tar_bytes += sum(BLOCK + -(-size // BLOCK) * BLOCK for size in sizes.values())  # header, content, padding
        # As the build stores it: a key that can't be a member's name is replaced by a short one.
        key = sample.key if naming.is_key(sample.key) else naming.short_key(sample.key)
        self.key_bytes = max(self.key_bytes, len(key))
        self.fields |= dict.fromkeys(sizes)
        self.strata[sample.label] += 1


def stats_of_mean(strata: Counter[int], mean_bytes: Mapping[str, float], *, key_bytes: int) -> SplitStats:
    """The totals of as many samples as `strata` counts, from the mean size of each field.

    Assumes half a block of padding for a field of more than one block.
    """
    count = strata.total()
    padded = (mean + BLOCK / 2 if mean > BLOCK else BLOCK for mean in mean_bytes.values())
    return SplitStats(
        num_samples=count,
        num_bytes=round(count * sum(mean_bytes.values())),
        tar_bytes=round(count * sum(BLOCK + size for size in padded)),
        key_bytes=key_bytes,
        fields=dict.fromkeys(mean_bytes),
        strata=strata,
    )


def even_strata(count: int, num_classes: int) -> Counter[int]:
    """`count` labels, spread evenly over the classes."""
    shares = {label: count * (label + 1) // num_classes - count * label // num_classes for label in range(num_classes)}
    return Counter({label: share for label, share in shares.items() if share})
