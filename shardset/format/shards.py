"""The shards of a split, in groups: the manifest describes each group, and a table next to it has a
row per shard.

A build writes one group. Where the shards of a group are equal, their sizes and first ids follow
from the manifest, and only the rows that are touched are read.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardset.checksum import crc32c_text
from shardset.errors import DamagedShard, ManifestError, NotFound
from shardset.format import naming, table
from shardset.prepared import prepared
from shardset.storage.base import Storage
from shardset.storage.many import in_order

SHARD_DTYPE: Final = np.dtype(
    [
        ("num_samples", "<u8"),
        ("num_bytes", "<u8"),
        ("crc32c", "<u4"),
        ("sha256", "V32"),
        ("index_bytes", "<u8"),
        ("index_crc32c", "<u4"),
        ("footer_bytes", "<u4"),
        ("footer_crc32c", "<u4"),
        table.CHECK,
    ]
)
"""The row of a shard. Its paths follow from its number, its first id from the shards before it."""

TAR_FACTS: Final = ["num_samples", "num_bytes", "crc32c", "sha256"]
"""The columns that tell one set from another; the bytes of an index depend on the version of
Arrow.
"""

WHOLE_ROWS: Final = 2048
"""A table of up to so many rows, 150 KB, is read whole."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Crc32c = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9+/]{6}==$", max_length=8)]
Pattern = Annotated[str, msgspec.Meta(pattern=r"^[^{}]*\{[0-9]{1,9}\.\.[0-9]{1,9}\}[^{}]*\.tar$")]
Promise = Literal["equal", "mixed", "reproducible"]

_PATTERN = re.compile(r"([^{}]*)\{([0-9]{1,9})\.\.([0-9]{1,9})\}([^{}]*)")
_ADVICE = "restore or rebuild the shard set"


class Record(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A part of the manifest."""


class IndexFile(Record, frozen=True, kw_only=True, gc=False):
    """The index of a shard.

    Attributes:
        path: Relative to the manifest.
        num_bytes: Its size.
        crc32c: Its CRC32C in base64, as Google Cloud Storage reports it.
        footer_bytes: The size of its end, by which parts of it are read.
        footer_crc32c: The CRC32C of that end.
    """

    path: str
    num_bytes: Count
    crc32c: Crc32c
    footer_bytes: Count
    footer_crc32c: Crc32c


class Shard(Record, frozen=True, kw_only=True):
    """One tar of a split.

    Attributes:
        path: Relative to the manifest.
        num_samples: Samples in the tar.
        num_bytes: The size of the tar.
        crc32c: Its CRC32C in base64, as Google Cloud Storage reports it.
        sha256: Its SHA-256, hexadecimal.
        first_id: The id of its first sample in the split.
        index: Its index.
    """

    path: str
    num_samples: Count
    num_bytes: Count
    crc32c: Crc32c
    sha256: Sha256
    first_id: Count
    index: IndexFile


@prepared
class Group(Record, frozen=True, kw_only=True):
    """Shards that were written together: their names as a brace pattern, and the table that
    describes them.

    Promises: `equal` if sizes differ by one sample at most and the larger shards come first,
    `mixed` if samples were permuted over all shards by `seed`, `reproducible` if the same plan
    makes the same bytes. `tars_sha256` covers what the table says of the tars.
    """

    shards: Pattern
    table: str
    table_crc32c: Crc32c
    tars_sha256: Sha256
    num_shards: Positive
    num_samples: Positive
    seed: Count
    plan_digest: Sha256
    promises: list[Promise]

    @property
    def is_equal(self) -> bool:
        """Whether the sizes of the shards follow from their number."""
        return "equal" in self.promises

    @property
    def is_own(self) -> bool:
        """Whether shardset wrote the tars, exactly as docs/reference/format.md says; others wrote
        those that were adopted.
        """
        return "reproducible" in self.promises

    @property
    def table_bytes(self) -> int:
        """The size of the table."""
        return table.num_bytes(SHARD_DTYPE, self.num_shards)

    @property
    def num_named(self) -> int:
        """The number of shards that the pattern names."""
        _, first, last, _ = _parts(self.shards)
        return int(last) + 1 - int(first)

    def part(self, first: int, last: int) -> str:
        """The pattern of the tars `first` to `last` of the group."""
        before, start, _, after = _parts(self.shards)
        numbers = (f"{int(start) + number:0{len(start)}d}" for number in (first, last))
        return f"{before}{{{'..'.join(numbers)}}}{after}"

    def path(self, number: int) -> str:
        """The path of one tar of the group."""
        before, first, _, after = _parts(self.shards)
        return f"{before}{int(first) + number:0{len(first)}d}{after}"


def pattern_of(folder: str, split: str, num_shards: int) -> str:
    """The brace pattern of the shards of a split."""
    return f"{folder}/{split}-{{{0:06d}..{num_shards - 1:06d}}}.tar"


def shard_row(shard: Shard) -> tuple[Any, ...]:
    """The row of a shard in the table; its check is still missing."""
    index, sha256 = shard.index, bytes.fromhex(shard.sha256)
    return (
        *(shard.num_samples, shard.num_bytes, _crc_number(shard.crc32c), sha256),
        *(index.num_bytes, _crc_number(index.crc32c)),
        *(index.footer_bytes, _crc_number(index.footer_crc32c), 0),
    )


class StoredShards(Sequence[Shard]):
    """The shards of a split, each made when it is asked for, from rows that are read once and kept.

    Without a storage only `groups` can be used, which are what a manifest holds. Reads at once the
    tables of groups that are not equal. Raises ManifestError if a table is missing, damaged, or
    says something else than the manifest.
    """

    def __init__(self, groups: Sequence[Group], storage: Storage | None = None) -> None:
        self.groups, self._opened_in = groups, storage
        if storage is not None:
            self._open(storage)

    def _open(self, storage: Storage) -> None:
        groups, self.storage = self.groups, storage
        self._starts = np.cumsum([0, *(group.num_shards for group in groups)])
        self._rows = np.zeros(self._starts[-1], SHARD_DTYPE)
        self._is_read = np.zeros(len(self._rows), bool)
        self.sizes: NDArray[np.int64] = np.concatenate(
            [self._sizes_of(number) for number in range(len(groups))]
        )
        self.first_ids = np.cumsum(np.append(0, self.sizes), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        numbers = range(len(self))[number]
        if isinstance(numbers, range):
            self.load(np.array(numbers))
            return [self._shard(each) for each in numbers]
        self.load(np.array([numbers]))
        return self._shard(numbers)

    def __iter__(self) -> Iterator[Shard]:
        self.load(np.arange(len(self)))
        return map(self._shard, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredShards) and self.groups == other.groups

    def __reduce__(self) -> tuple[type["StoredShards"], tuple[Sequence[Group], Storage | None]]:
        return StoredShards, (self.groups, self._opened_in)

    def load(self, numbers: NDArray[np.int64]) -> None:
        """Reads the rows of some shards with their neighbours, at the same time from a bucket."""
        missing = numbers[~self._is_read[numbers]]
        if not len(missing):
            return
        reads = [
            (group, rows)
            for group, (start, stop) in enumerate(zip(self._starts, self._starts[1:], strict=False))
            for rows in _runs(missing[(missing >= start) & (missing < stop)] - start, stop - start)
        ]
        at_once = min(self.storage.reads_at_once, len(reads))
        for _ in in_order(at_once, reads, lambda read: self._read(*read)):
            pass

    def group_of(self, number: int) -> Group:
        """The group of a shard."""
        return self.groups[self._number_of_group(number)]

    def _number_of_group(self, number: int) -> int:
        return int(np.searchsorted(self._starts, number, side="right")) - 1

    def _shard(self, number: int) -> Shard:
        group = self._number_of_group(number)
        path = self.groups[group].path(number - self._starts.item(group))
        num_samples, num_bytes, crc32c, sha256, *index, _ = self._rows[number].item()
        index_bytes, index_crc32c, footer_bytes, footer_crc32c = index
        return Shard(
            path=path,
            num_samples=num_samples,
            num_bytes=num_bytes,
            crc32c=crc32c_text(crc32c),
            sha256=sha256.hex(),
            first_id=self.first_ids.item(number),
            index=IndexFile(
                path=naming.index_path(path),
                num_bytes=index_bytes,
                crc32c=crc32c_text(index_crc32c),
                footer_bytes=footer_bytes,
                footer_crc32c=crc32c_text(footer_crc32c),
            ),
        )

    def _sizes_of(self, number: int) -> NDArray[np.int64]:
        """The samples of each shard of a group."""
        group = self.groups[number]
        if group.is_equal:
            size, larger = divmod(group.num_samples, group.num_shards)
            return size + (np.arange(group.num_shards) < larger)
        rows = self._read(number, range(group.num_shards))
        sizes: NDArray[np.int64] = rows["num_samples"].astype(np.int64)
        if sizes.min() < 1 or sizes.sum() != group.num_samples:
            raise ManifestError(
                f"{self.storage.url}/{group.table}: its shards hold {sizes.sum()} samples, at least"
                f" {sizes.min()} each; the manifest says {group.num_samples}; {_ADVICE}"
            )
        return sizes

    def _read(self, number: int, wanted: range) -> table.Rows:
        """Reads some rows of the table of a group."""
        group, start, url = self.groups[number], self._starts.item(number), self.storage.url
        try:
            rows = table.read_rows(
                self.storage, group.table, SHARD_DTYPE, group.num_shards, wanted,
                crc32c=group.table_crc32c, advice=_ADVICE,
            )  # fmt: skip
        except NotFound as error:
            raise ManifestError(
                f"{url}/{group.table}: this table of shards is missing; {_ADVICE}"
            ) from error
        except DamagedShard as error:
            raise ManifestError(f"a table of shards is damaged: {error}") from error
        numbers = slice(start + wanted.start, start + wanted.stop)
        if group.is_equal and not np.array_equal(rows["num_samples"], self.sizes[numbers]):
            raise ManifestError(
                f"{url}/{group.table}: its shards are not equal, though the manifest says so;"
                f" {_ADVICE}"
            )
        self._rows[numbers] = rows
        self._is_read[numbers] = True
        return rows


def _runs(missing: NDArray[np.int64], num_rows: int) -> Iterator[range]:
    """The ranges of rows to read for those that are missing."""
    if num_rows > WHOLE_ROWS:
        return table.runs_of_groups(np.unique(missing // table.ROWS_AT_ONCE), num_rows)
    return iter([range(num_rows)] if len(missing) else [])


def _parts(pattern: str) -> tuple[str, str, str, str]:
    match = _PATTERN.fullmatch(pattern)
    assert match, "the type of the field has this form"
    before, first, last, after = match.groups()
    return before, first, last, after


def _crc_number(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big")
