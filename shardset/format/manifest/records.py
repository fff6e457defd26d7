"""The records of a manifest, which are its JSON.

`docs/reference/format.md` explains each field; `docs/manifest.schema.json` is for programs.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from shardset.errors import ConfigError, MissingSet
from shardset.format.shards import Count, Group, Positive, Record, Sha256, Shard, StoredShards
from shardset.order.permutation import hash_text
from shardset.prepared import prepared

KIND: Final = "shardset"
VERSION: Final = 1


class ClassInfo(Record, frozen=True, kw_only=True):
    """One class.

    Attributes:
        label: Its number, from 0.
        name: Its name.
        wnid: Its WordNet id; None if it has none.
        category_id: Its number in COCO's files; None if it has none.
        is_group: Whether it is a category that only groups others there: their `supercategory`,
            which no annotation has, such as the root in files of Roboflow.
    """

    label: Count
    name: str
    wnid: str | None = None
    category_id: int | None = None
    is_group: bool = False


class Split(Record, frozen=True, kw_only=True):
    """All shards of one split, in the order of ids.

    Attributes:
        num_samples: Stored samples: `num_source_samples - num_dropped + num_repeats`.
        num_source_samples: Raw samples that could be used.
        num_dropped: Usable raw samples that are not stored.
        num_repeats: Stored samples that repeat another one.
        num_content_bytes: Bytes of all fields, without tar headers and padding.
        num_tar_bytes: Bytes of all tars.
        max_tar_bytes: Bytes of the largest tar.
        fields: All fields that occur, in the order of the index's columns.
        class_totals: The number of samples of each class, by label.
        shards: A sequence of Shard, each made when it is asked for. In the file they are `groups`.
    """

    num_samples: Count
    num_source_samples: Count
    num_dropped: Count
    num_repeats: Count
    num_content_bytes: Count
    num_tar_bytes: Count
    max_tar_bytes: Count
    fields: list[str]
    class_totals: list[Count]
    shards: StoredShards = msgspec.field(name="groups")

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of shards, whether their tables can be read or not."""
        return self.shards.groups

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
        sizes: list[int] = self.shards.sizes.tolist()
        return sizes

    def check_fields(self, names: Iterable[str]) -> None:
        """Raises ConfigError for a field that no sample has; it names those that there are."""
        if missing := [name for name in names if name not in self.fields]:
            raise ConfigError(
                f"no field {missing[0]!r} in this split; it has {', '.join(self.fields)}"
            )


class Quarantine(Record, frozen=True, kw_only=True):
    """How many raw samples were rejected, and the file that lists them with their reasons."""

    count: Count
    path: str


class Provenance(Record, frozen=True, kw_only=True):
    """Where the set comes from.

    Nothing here depends on when, where or on how many machines it was built.

    `appended` says the same of each append, in order.
    """

    tool: str
    source: str
    source_digest: Sha256
    options: dict[str, Any]
    libraries: dict[str, str]
    notes: list[str]
    appended: "list[Provenance]" = msgspec.field(default_factory=list)


@prepared
class Manifest(Record, frozen=True, kw_only=True):
    """A shard set. If it is there, the set is complete: it is written after all that it lists.

    Attributes:
        kind: Always "shardset".
        version: Of the format: 1.
        digest: SHA-256 (hexadecimal) of the set: equal digests mean equal sets.
        number: The version of the set: a build makes 1, and each change adds one.
        classes: A record for each class, by label: `label`, `name`, `wnid`.
        splits: A Split by name.
        quarantine: `count` of rejected raw samples, and the `path` of their list.
        fixes: How many raw samples were fixed, by the kind of fix.
        provenance: Where the set comes from: `tool`, `source`, `options`, `libraries`, `notes`, ...
        forgotten: A hash of each key that a compaction dropped.
    """

    kind: Literal["shardset"]
    version: Literal[1]
    digest: Sha256
    number: Positive = 1
    classes: list[ClassInfo]
    splits: dict[str, Split]
    quarantine: Quarantine
    fixes: dict[str, Count]
    provenance: Provenance
    forgotten: list[Count] = msgspec.field(default_factory=list)

    def class_name(self, label: int) -> str:
        """The name of the class with that label.

        Args:
            label: The number of the class.

        Returns:
            The name; "" if there is no such class.
        """
        return self.classes[label].name if 0 <= label < len(self.classes) else ""

    @property
    def labels_by_category(self) -> dict[int, int]:
        """The labels of classes by their numbers in COCO's files, without those that have none."""
        return {
            info.category_id: info.label for info in self.classes if info.category_id is not None
        }

    @property
    def is_own(self) -> bool:
        """Whether shardset wrote all tars; others wrote those that were adopted."""
        return all(group.is_own for group in self.groups)

    @property
    def has_names(self) -> bool:
        """Whether a build made the set, so that samples have names in its raw input."""
        return self.provenance.source not in ("writer", "adopt", "column")

    @property
    def groups(self) -> list[Group]:
        """The groups of all splits."""
        return [group for split in self.splits.values() for group in split.groups]

    @property
    def shards(self) -> Iterator[Shard]:
        """The shards of all splits, once it is `opened`."""
        return (shard for split in self.splits.values() for shard in split.shards)

    @property
    def seed(self) -> int:
        """The seed of the order in which the build stored the samples.

        If shards were added, it is the seed of the first build.
        """
        return next(iter(self.splits.values())).groups[0].seed

    def split(self, name: str) -> Split:
        """The split of that name.

        Args:
            name: The name of the split, such as "train".

        Raises:
            MissingSet: There is no such split; the message names those that exist.
        """
        if name not in self.splits:
            raise MissingSet(
                f"no split {name!r} in this shard set; it has {', '.join(sorted(self.splits))}"
            )
        return self.splits[name]


def hash_of_key(key: str) -> int:
    """What is left of a forgotten key: 32 bits, which tell it from a mistyped one."""
    return hash_text(key, key=0) >> 32
