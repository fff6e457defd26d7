"""The records of a manifest, and what they must say about each other: counts add up, paths stay inside."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from shardset.errors import ManifestError
from shardset.format import naming
from shardset.format.shards import Count, PagedShards, Record, Sha256, Shard, ShardPages, pages_of
from shardset.prepared import prepared

LISTED: Final = 1
PAGED: Final = 2
VERSION: Final = PAGED
"""Version 1 lists the shards in the JSON; version 2, for very many, in pages beside it."""

_COUNTED_AT_ONCE = 1024

Remainder = Literal["spread", "drop", "pad"]

if TYPE_CHECKING:  # what readers see; below, what stands in the file
    Shards = Sequence[Shard]
else:
    Shards = list[Shard] | ShardPages


class ClassInfo(Record, frozen=True, kw_only=True):
    """One class: its 0-based label, its name, and its WordNet id if it has one."""

    label: Count
    name: str
    wnid: str | None = None


class Split(Record, frozen=True, kw_only=True):
    """All shards of one split, in id order. `fields` are all that occur, in the order of the index's columns.

    `shards` is a sequence in every loaded manifest; in version 2 it makes each shard when it is asked for.
    """

    num_samples: Count
    num_shards: Count
    num_source_samples: Count
    num_dropped: Count
    num_repeats: Count
    num_content_bytes: Count
    fields: list[str]
    shards: Shards

    @property
    def mean_bytes(self) -> float:
        """Mean content bytes of a sample, over all its fields and without tar headers."""
        return self.num_content_bytes / max(1, self.num_samples)

    @property
    def shard_sizes(self) -> list[int]:
        """The samples of each shard."""
        shards = self.shards
        if isinstance(shards, PagedShards):
            return shards.column("num_samples")
        return [shard.num_samples for shard in shards]

    @property
    def tar_bytes(self) -> list[int]:
        """The bytes of each tar."""
        shards = self.shards
        return shards.column("num_bytes") if isinstance(shards, PagedShards) else [shard.num_bytes for shard in shards]

    @property
    def index_bytes(self) -> list[int]:
        """The bytes of each index."""
        shards = self.shards
        if isinstance(shards, PagedShards):
            return shards.column("index_num_bytes")
        return [shard.index.num_bytes for shard in shards]

    @property
    def class_totals(self) -> list[int]:
        """The samples of each class, by label; empty if the set has no classes."""
        if isinstance(self.shards, PagedShards):
            return self.shards.pages.class_counts
        totals: list[int] = sum(block.sum(axis=0) for block in self.count_blocks()).tolist()
        return totals

    def count_blocks(self) -> Iterator[NDArray[np.integer[Any]]]:
        """The class counts of consecutive shards, [shard, class], in blocks that fit into memory."""
        shards = self.shards
        if isinstance(shards, PagedShards):
            yield from shards.count_blocks()
            return
        for start in range(0, len(shards), _COUNTED_AT_ONCE):
            yield np.array([shard.class_counts for shard in shards[start : start + _COUNTED_AT_ONCE]], np.int64)


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
    version: Literal[1, 2]
    digest: Sha256
    plan_digest: Sha256
    seed: Count
    order_version: Count
    remainder: Remainder
    classes: list[ClassInfo]
    splits: dict[str, Split]
    quarantine: Quarantine
    fixes: dict[str, Count]
    provenance: Provenance

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
    naming.check_relative(manifest.quarantine.path, where)
    for name, split in manifest.splits.items():
        if not naming.is_split(name):
            yield f"{where}: {name!r} can't name a split (letters, digits, - and _, not plan)"
        yield from _split_problems(split, manifest, f"{where}: split {name!r}")
    for path, count in Counter(_listed_paths(manifest)).items():
        if count > 1:
            yield f"{where}: path {path!r} is listed twice"


def problems_in_pages(manifest: Manifest, where: str) -> Iterator[str]:
    """What is wrong with the shards of version 2, whose pages have been read."""
    for name, split in manifest.splits.items():
        shards, place = split.shards, f"{where}: split {name!r}"
        assert isinstance(shards, PagedShards)
        if min(min(shards.column(column)) for column in ("num_samples", "num_bytes", "index_num_bytes")) < 1:
            yield f"{place}: num_samples and num_bytes must be positive"
        if (num_samples := sum(split.shard_sizes)) != split.num_samples:
            yield f"{place}: num_samples is {split.num_samples} but its shards hold {num_samples}"
        yield from _size_problems(split.shard_sizes, manifest.remainder, place)


def _split_problems(split: Split, manifest: Manifest, where: str) -> Iterator[str]:
    pages = pages_of(split.shards)
    if (pages is None) != (manifest.version == LISTED):
        yield f"{where}: its shards are not stored in the way of version {manifest.version}"
        return
    is_unique = len(set(split.fields)) == len(split.fields) > 0
    if not is_unique or not all(map(naming.is_field, split.fields)):
        yield f"{where}: fields {split.fields} can't be those of a sample"
    if pages is None:
        yield from _listed_problems(split, len(manifest.classes), where)
    else:
        yield from _paged_problems(split, pages, len(manifest.classes), where)
    expected = split.num_source_samples - split.num_dropped + split.num_repeats
    if split.num_samples != expected:
        terms = (
            f"{split.num_source_samples} source samples, {split.num_dropped} dropped and {split.num_repeats} repeats"
        )
        yield f"{where}: {terms} make {expected}, but num_samples is {split.num_samples}"
    if pages is None:
        yield from _size_problems(split.shard_sizes, manifest.remainder, where)


def _listed_problems(split: Split, num_classes: int, where: str) -> Iterator[str]:
    if split.num_shards != len(split.shards) or not split.shards:
        yield f"{where}: num_shards is {split.num_shards} but {len(split.shards)} are listed"
    first_id = 0
    for shard in split.shards:
        yield from _shard_problems(shard, first_id, num_classes, f"{where}: shard {shard.path!r}")
        first_id += shard.num_samples
    if first_id != split.num_samples:
        yield f"{where}: num_samples is {split.num_samples} but its shards hold {first_id}"


def _paged_problems(split: Split, pages: ShardPages, num_classes: int, where: str) -> Iterator[str]:
    for path in (pages.folder, *(page.path for page in pages.files)):
        naming.check_relative(path, where)
    if len(pages.class_counts) != num_classes:
        yield f"{where}: {len(pages.class_counts)} class counts for {num_classes} classes"
    if (num_counted := sum(pages.class_counts)) > split.num_samples:
        yield f"{where}: class counts add up to {num_counted}, but it holds {split.num_samples} samples"


def _size_problems(shard_sizes: Sequence[int], remainder: Remainder, where: str) -> Iterator[str]:
    smallest, largest = min(shard_sizes), max(shard_sizes)
    most_apart, allowed = (1, "at most one apart") if remainder == "spread" else (0, "all equal")
    if largest - smallest > most_apart:
        sentence = f"shards hold {smallest} to {largest} samples, expected sizes {allowed}"
        yield f"{where}: {sentence} with remainder {remainder!r}"


def _shard_problems(shard: Shard, first_id: int, num_classes: int, where: str) -> Iterator[str]:
    naming.check_relative(shard.path, where)
    naming.check_relative(shard.index.path, where)
    if shard.num_samples < 1 or shard.num_bytes < 1 or shard.index.num_bytes < 1:
        yield f"{where}: num_samples and num_bytes must be positive"
    if shard.first_id != first_id:
        yield f"{where}: first_id is {shard.first_id}, expected {first_id} from the shards before it"
    if len(shard.class_counts) != num_classes:
        yield f"{where}: {len(shard.class_counts)} class counts for {num_classes} classes"
    num_counted = sum(shard.class_counts)
    if num_counted > shard.num_samples:
        yield f"{where}: class counts add up to {num_counted}, but it holds {shard.num_samples} samples"


def _listed_paths(manifest: Manifest) -> Iterator[str]:
    """The paths that stand in the file. Those that follow from the number of a shard differ from each other."""
    for split in manifest.splits.values():
        if pages := pages_of(split.shards):
            yield from (page.path for page in pages.files)
        else:
            yield from (path for shard in split.shards for path in (shard.path, shard.index.path))
