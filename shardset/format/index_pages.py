"""Pages of large indexes, each with a checksum of its own, so that a reader can verify the rows that it needs.

The checksums of a split are in files beside its shards. The manifest does not list them and need not: those of an index
make its CRC32C, which the manifest has. A set without these files is whole; its indexes are read whole.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardset.checksum import crc32c_of, crc32c_text, joined_crc32c
from shardset.format import naming
from shardset.format.index import index_dtype, index_header
from shardset.format.records import Split
from shardset.format.shards import SHARDS_PER_PAGE, IndexFile, pages_of

ROWS_PER_PAGE: Final = 64
"""About 5 KB: little more than a small image takes in its tar."""

LARGE_BYTES: Final = 128 << 10
"""An index of more bytes has pages: one of more than about 1,600 samples."""

FILE_HEADER_BYTES: Final = 128
ENTRY: Final = np.dtype("<u4")

_MAX_HEADER_BYTES = 10 + 65_535
_BEFORE_PAGES = 2


def first_entries(split: Split) -> NDArray[np.int64]:
    """Where the entries of each shard would begin in one file for the split, and the end; small indexes have none."""
    index_bytes, num_samples = np.array(split.index_bytes, np.int64), np.array(split.shard_sizes, np.int64)
    counts = np.where(index_bytes > LARGE_BYTES, _BEFORE_PAGES - -num_samples // ROWS_PER_PAGE, 0)
    return np.concatenate([[0], np.cumsum(counts)])


def entries_of(index: bytes) -> bytes:
    """What the files have for an index: the size of its header, the CRC32C of this and of each page; or nothing."""
    if len(index) <= LARGE_BYTES:
        return b""
    dtype, _, start = index_header(index, "an index that was just made")
    size = ROWS_PER_PAGE * dtype.itemsize
    pages = (crc32c_of(index[first : first + size]) for first in range(start, len(index), size))
    return np.array([start, crc32c_of(index[:start]), *pages], ENTRY).tobytes()


def file_bytes(entries: Sequence[bytes]) -> bytes:
    """A file of checksums, from the entries of its shards."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.frombuffer(b"".join(entries), ENTRY), version=(1, 0), allow_pickle=False)
    assert out.tell() == FILE_HEADER_BYTES + sum(map(len, entries)), "each version of NumPy writes this header"
    return out.getvalue()


def file_names(name: str, split: Split) -> list[str]:
    """The names of the files of a split, which it has if an index is large; needs no page of the manifest."""
    pages = pages_of(split.shards)
    first = naming.shard_path(pages.folder, name, 0) if pages else split.shards[0].path
    return [naming.index_pages_path(first, number) for number in range(-(-split.num_shards // shards_per_file(split)))]


def shards_per_file(split: Split) -> int:
    """The number of shards whose entries are in one file."""
    pages = pages_of(split.shards)
    return pages.shards_per_page if pages else SHARDS_PER_PAGE


@dataclass(frozen=True, slots=True, eq=False)
class IndexPages:
    """The layout of a large index and the CRC32C of each of its pages, which make that of the whole."""

    dtype: np.dtype[Any]
    num_samples: int
    start: int
    crcs: NDArray[np.uint32]

    @classmethod
    def from_entries(cls, data: bytes, index: IndexFile, num_samples: int, fields: Sequence[str]) -> Self | None:
        """The pages of an index; None for anything but the entries of the index that the manifest lists."""
        start, header_crc, *crcs = np.frombuffer(data, ENTRY).tolist()
        record_bytes, rest = divmod(index.num_bytes - start, num_samples)
        key_bytes = record_bytes - index_dtype(fields, 1).itemsize + 1
        if rest or key_bytes < 1 or not 0 < start <= _MAX_HEADER_BYTES:
            return None
        pages = cls(index_dtype(fields, key_bytes), num_samples, start, np.array(crcs, ENTRY))
        sizes = (stop - first for first, stop in (pages.byte_range(page, page + 1) for page in range(len(crcs))))
        joined = joined_crc32c([(header_crc, start), *zip(crcs, sizes, strict=True)])
        return pages if crc32c_text(joined) == index.crc32c else None

    def byte_range(self, first: int, last: int) -> tuple[int, int]:
        """The bytes [start, stop) of the index that hold the pages [first, last)."""
        rows = first * ROWS_PER_PAGE, min(last * ROWS_PER_PAGE, self.num_samples)
        return self.start + rows[0] * self.dtype.itemsize, self.start + rows[1] * self.dtype.itemsize

    def fits(self, first: int, data: bytes) -> bool:
        """Whether `data` is that of the pages from `first` on."""
        size = ROWS_PER_PAGE * self.dtype.itemsize
        pieces = (data[begin : begin + size] for begin in range(0, len(data), size))
        return all(crc32c_of(piece) == crc for piece, crc in zip(pieces, self.crcs[first:].tolist(), strict=False))
