"""The records of a manifest, and what they must say about each other: counts add up, paths stay inside."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from shardset.errors import ManifestError
from shardset.format import naming
from shardset.format.shards import Count, Group, Record, Sha256, Shard, StoredShards
from shardset.prepared import prepared

VERSION: Final = 1

if TYPE_CHECKING:  # what readers see; below, what the file holds
    Shards = Sequence[Shard]
else:
    Shards = list[Group]


class ClassInfo(Record, frozen=True, kw_only=True):
    """One class: its 0-based label, its name, and its WordNet id if it has one."""

    label: Count
    name: str
    wnid: str | None = None


class Split(Record, frozen=True, kw_only=True):
    """All shards of one split, in id order. `fields` are all that occur, in the order of the index's columns.

    `shards` makes each shard when it is asked for; in the file they are `groups`. `class_totals` has the samples of
    each class, by label.
    """

    num_samples: Count
    num_source_samples: Count
    num_dropped: Count
    num_repeats: Count
    num_content_bytes: Count
    num_tar_bytes: Count
    max_tar_bytes: Count
    max_index_bytes: Count
    fields: list[str]
    class_totals: list[Count]
    shards: Shards = msgspec.field(name="groups")

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of shards, whether their tables can be read or not."""
        shards: Any = self.shards
        return shards.groups if isinstance(shards, StoredShards) else shards

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return sum(group.num_shards for group in self.groups)

    @property
    def mean_bytes(self) -> float:
        """Mean content bytes of a sample, over all its fields and without tar headers."""
        return self.num_content_bytes / max(1, self.num_samples)

    @property
    def shard_sizes(self) -> list[int]:
        """The samples of each shard."""
        assert isinstance(self.shards, StoredShards), "of a manifest that was opened"
        sizes: list[int] = self.shards.sizes.tolist()
        return sizes

    def load(self, shards: Sequence[int]) -> None:
        """Reads the table rows of some shards at the same time, before they are asked for one by one."""
        if isinstance(self.shards, StoredShards):
            self.shards.load(np.array(shards, np.int64))


class Quarantine(Record, frozen=True, kw_only=True):
    """How many raw samples were rejected, and the file that lists them with their reasons."""

    count: Count
    path: str


class Provenance(Record, frozen=True, kw_only=True):
    """Where the set comes from. Nothing here depends on when, where or on how many machines it was built."""

    tool: str
    source: str
    source_digest: Sha256
    options: dict[str, Any]
    libraries: dict[str, str]
    notes: list[str]


@prepared
class Manifest(Record, frozen=True, kw_only=True):
    """A shard set. Present means complete: it is written after everything it lists."""

    kind: Literal["shardset"]
    version: Literal[1]
    digest: Sha256
    classes: list[ClassInfo]
    splits: dict[str, Split]
    quarantine: Quarantine
    fixes: dict[str, Count]
    provenance: Provenance

    @property
    def seed(self) -> int:
        """The seed of the order in which the build stored the samples; of the first one, if shards were added."""
        return next(iter(self.splits.values())).groups[0].seed

    def split(self, name: str) -> Split:
        """The split of that name; raises ManifestError naming those that exist."""
        if name not in self.splits:
            raise ManifestError(f"no split {name!r} in this shard set; it has {', '.join(sorted(self.splits))}")
        return self.splits[name]


def problems(manifest: Manifest, where: str) -> Iterator[str]:
    """What is wrong with the file of a manifest, in words; `where` begins each sentence."""
    num_classes = len(manifest.classes)
    if [info.label for info in manifest.classes] != list(range(num_classes)):
        yield f"{where}: class labels are not 0 to {num_classes - 1} in order"
    for name, split in manifest.splits.items():
        if not naming.is_split(name):
            yield f"{where}: {name!r} can't name a split (letters, digits, - and _, not plan)"
        yield from _split_problems(split, num_classes, f"{where}: split {name!r}")
    groups = [group for split in manifest.splits.values() for group in split.groups]
    paths = [path for group in groups for path in (group.shards, group.table)]
    for path, count in Counter([manifest.quarantine.path, *paths]).items():
        naming.check_relative(path, where)
        if count > 1:
            yield f"{where}: path {path!r} is listed twice"


def _split_problems(split: Split, num_classes: int, where: str) -> Iterator[str]:
    is_unique = len(set(split.fields)) == len(split.fields) > 0
    if not is_unique or not all(map(naming.is_field, split.fields)):
        yield f"{where}: fields {split.fields} can't be those of a sample"
    if len(split.class_totals) != num_classes:
        yield f"{where}: {len(split.class_totals)} class totals for {num_classes} classes"
    if (num_labelled := sum(split.class_totals)) > split.num_samples:
        yield f"{where}: class totals add up to {num_labelled}, but it holds {split.num_samples} samples"
    for group in split.groups:
        if group.num_shards != group.num_named:
            yield f"{where}: {group.shards!r} names {group.num_named} shards, expected {group.num_shards}"
        if group.num_samples < group.num_shards:
            yield f"{where}: {group.num_samples} samples don't fill {group.num_shards} shards"
    if split.num_samples != (num_samples := sum(group.num_samples for group in split.groups)) or not num_samples:
        yield f"{where}: num_samples is {split.num_samples} but its groups hold {num_samples}"
    expected = split.num_source_samples - split.num_dropped + split.num_repeats
    if split.num_samples != expected:
        terms = (
            f"{split.num_source_samples} source samples, {split.num_dropped} dropped and {split.num_repeats} repeats"
        )
        yield f"{where}: {terms} make {expected}, but num_samples is {split.num_samples}"
