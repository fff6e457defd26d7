"""What the samples of a split come to, counted one by one or by their mean size."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelines.plan.index import fields_of
from pipelines.sources.base import Extent, RawSample
from shardset.format import naming
from shardset.format.tar import BLOCK


@dataclass(slots=True)
class SplitStats:
    """What samples come to; `tar_bytes` with headers and padding, without the end of a tar. `strata` counts labels."""

    num_samples: int = 0
    num_bytes: int = 0
    tar_bytes: int = 0
    key_bytes: int = 0
    fields: dict[str, None] = field(default_factory=dict)
    strata: Counter[int] = field(default_factory=Counter)

    def add(self, sample: RawSample) -> None:
        """Counts one more."""
        sizes = [
            (name, content.num_bytes if isinstance(content, Extent) else len(content))
            for name, content in fields_of(sample)
        ]
        self.num_samples += 1
        self.num_bytes += sum(size for _, size in sizes)
        self.tar_bytes += sum(member_bytes(size) for _, size in sizes)
        key = sample.key if naming.is_key(sample.key) else naming.short_key(sample.key)
        self.key_bytes = max(self.key_bytes, len(key))
        self.fields |= dict.fromkeys(name for name, _ in sizes)
        self.strata[sample.label] += 1

    def join(self, other: "SplitStats") -> None:
        """Counts all of another."""
        self.num_samples += other.num_samples
        self.num_bytes += other.num_bytes
        self.tar_bytes += other.tar_bytes
        self.key_bytes = max(self.key_bytes, other.key_bytes)
        self.fields |= other.fields
        self.strata += other.strata

    def like(self, strata: Counter[int]) -> "SplitStats":
        """As many samples as `strata` counts, all of this mean size."""
        count = strata.total()
        return SplitStats(
            num_samples=count,
            num_bytes=round(self.num_bytes / self.num_samples * count),
            tar_bytes=round(self.tar_bytes / self.num_samples * count),
            key_bytes=self.key_bytes,
            fields=dict(self.fields),
            strata=strata,
        )


def of_size(strata: Counter[int], num_bytes: Mapping[str, int], *, key_bytes: int) -> SplitStats:
    """As many samples as `strata` counts, each field of one size."""
    return _alike(strata, num_bytes, sum(map(member_bytes, num_bytes.values())), key_bytes)


def of_mean(strata: Counter[int], mean_bytes: Mapping[str, float], *, key_bytes: int) -> SplitStats:
    """As many samples as `strata` counts, by the mean size of each field; half a block of padding where it is large."""
    padded = (mean + BLOCK / 2 if mean > BLOCK else BLOCK for mean in mean_bytes.values())
    return _alike(strata, mean_bytes, sum(BLOCK + size for size in padded), key_bytes)


def _alike(strata: Counter[int], num_bytes: Mapping[str, float], tar_bytes: float, key_bytes: int) -> SplitStats:
    count = strata.total()
    return SplitStats(
        num_samples=count,
        num_bytes=round(count * sum(num_bytes.values())),
        tar_bytes=round(count * tar_bytes),
        key_bytes=key_bytes,
        fields=dict.fromkeys(num_bytes),
        strata=strata,
    )


def spread(count: int, num_classes: int) -> Counter[int]:
    """`count` labels, all of them alike; -1, no label, where there are no classes."""
    if not num_classes:
        return Counter({-1: count})
    shares = {label: count * (label + 1) // num_classes - count * label // num_classes for label in range(num_classes)}
    return Counter({label: share for label, share in shares.items() if share})


def digits(num_classes: int) -> int:
    """The length of the longest label."""
    return len(str(num_classes - 1))


def member_bytes(size: int) -> int:
    """A member of a tar: header, content, padding."""
    return BLOCK + (size + BLOCK - 1) // BLOCK * BLOCK
