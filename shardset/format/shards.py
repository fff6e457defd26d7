"""The shards of a split: listed in the manifest (version 1), or in pages of fixed-width records beside it (version 2).

A page is an `.npy` file. Its header follows from the manifest, so it is compared, never parsed.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardset.checksum import crc32c_text
from shardset.errors import ManifestError, NotFound
from shardset.format import naming
from shardset.storage.base import Storage
from shardset.storage.checked import DamagedObject, read_object

SHARDS_PER_PAGE: Final = 8192
SHARDS_PER_COUNT_PAGE: Final = 1024
"""Smaller, because a row has a number for each class: 22 MB with 21,841 classes of at most 255 samples a shard."""

PAGE_DTYPE: Final = np.dtype(
    [
        ("num_samples", "<u8"),
        ("num_bytes", "<u8"),
        ("crc32c", "<u4"),
        ("sha256", "V32"),
        ("index_num_bytes", "<u8"),
        ("index_crc32c", "<u4"),
    ]
)
"""One shard in a page. Its path and its first id follow from its number and from the shards before it."""

COUNT_DTYPES: Final = tuple(map(np.dtype, ("u1", "<u2", "<u4", "<u8")))
"""A count page has the smallest that holds its numbers."""

_NPY_1_0 = b"\x93NUMPY\x01\x00"

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Crc32c = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9+/]{6}==$", max_length=8)]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of the manifest."""


class IndexFile(Record, frozen=True, kw_only=True, gc=False):
    """The index of a shard: path relative to the manifest, size, CRC32C (base64, as GCS reports it)."""

    path: str
    num_bytes: Count
    crc32c: Crc32c


class Shard(Record, frozen=True, kw_only=True):
    """One tar. `first_id` is the id of its first sample in the split; `class_counts[label]` counts its samples.

    In a set of version 2 the first use of `class_counts` reads the page that holds them.
    """

    path: str
    num_samples: Count
    num_bytes: Count
    crc32c: Crc32c
    sha256: Sha256
    first_id: Count
    index: IndexFile
    class_counts: Sequence[Count]


class PageFile(Record, frozen=True, kw_only=True):
    """A page beside the manifest: path relative to it, size and checksums."""

    path: str
    num_bytes: Count
    crc32c: Crc32c
    sha256: Sha256


class ShardPages(Record, frozen=True, kw_only=True):
    """The shards of a split in version 2: `FOLDER/SPLIT-000000.tar` and so on, described in `pages`.

    `class_counts` are the samples of each class in the split; `count_pages` have them by shard.
    """

    folder: str
    shards_per_page: Positive
    pages: list[PageFile]
    class_counts: list[Count]
    shards_per_count_page: Positive
    count_pages: list[PageFile]

    @property
    def files(self) -> list[PageFile]:
        """All pages."""
        return [*self.pages, *self.count_pages]


def pages_of(shards: object) -> ShardPages | None:
    """The pages of the shards of a split, whether they have been read or not; None in version 1."""
    if isinstance(shards, PagedShards):
        return shards.pages
    return shards if isinstance(shards, ShardPages) else None


def page_bytes(shards: Sequence[Shard]) -> bytes:
    """The page of some consecutive shards."""
    rows = [
        (
            shard.num_samples,
            shard.num_bytes,
            _crc_number(shard.crc32c),
            bytes.fromhex(shard.sha256),
            shard.index.num_bytes,
            _crc_number(shard.index.crc32c),
        )
        for shard in shards
    ]
    records = np.array(rows, PAGE_DTYPE)
    return _header(PAGE_DTYPE, records.shape) + records.tobytes()


def count_page_bytes(counts: NDArray[np.integer[Any]]) -> bytes:
    """The count page of some consecutive shards: [shard, class]."""
    largest = int(counts.max(initial=0))
    dtype = next(dtype for dtype in COUNT_DTYPES if largest <= np.iinfo(dtype).max)
    return _header(dtype, counts.shape) + np.ascontiguousarray(counts, dtype).tobytes()


class PagedShards(Sequence[Shard]):
    """The shards of a split of version 2, each made when it is asked for. Reads `pages` at once, and verifies them.

    Raises ManifestError if a page is missing or damaged; what is damaged is read a second time first.
    """

    def __init__(self, storage: Storage, split: str, num_shards: int, pages: ShardPages) -> None:
        self.storage, self.split, self.pages = storage, split, pages
        self.num_classes = len(pages.class_counts)
        self._check_number(num_shards)
        shapes = [(len(numbers),) for numbers in _cut(num_shards, pages.shards_per_page)]
        with ThreadPoolExecutor(max(1, min(storage.reads_at_once, len(shapes)))) as threads:
            parts = threads.map(lambda page, shape: _read(storage, page, [PAGE_DTYPE], shape), pages.pages, shapes)
            self.columns = np.concatenate([*parts])
        self.first_ids = np.cumsum(np.append(0, self.columns["num_samples"]), dtype=np.int64)
        self._last_counts: tuple[int, NDArray[Any]] | None = None

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, number: int) -> Shard: ...
    @overload
    def __getitem__(self, number: slice) -> list[Shard]: ...
    def __getitem__(self, number: int | slice) -> Shard | list[Shard]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        number = range(len(self))[number]
        num_samples, num_bytes, crc32c, sha256, index_num_bytes, index_crc32c = self.columns[number].item()
        path = naming.shard_path(self.pages.folder, self.split, number)
        return Shard(
            path=path,
            num_samples=num_samples,
            num_bytes=num_bytes,
            crc32c=crc32c_text(crc32c),
            sha256=sha256.hex(),
            first_id=self.first_ids.item(number),
            index=IndexFile(path=naming.index_path(path), num_bytes=index_num_bytes, crc32c=crc32c_text(index_crc32c)),
            class_counts=ClassCounts(self, number) if self.num_classes else [],
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagedShards) and (self.split, self.pages) == (other.split, other.pages)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last_counts": None}

    def column(self, name: str) -> list[int]:
        """A number of every shard: `num_samples`, `num_bytes` or `index_num_bytes`."""
        numbers: list[int] = self.columns[name].tolist()
        return numbers

    def count_blocks(self) -> Iterator[NDArray[np.integer[Any]]]:
        """The class counts of all shards, [shard, class], a page at a time."""
        yield from map(self.count_page, range(len(self.pages.count_pages)))

    def count_page(self, page: int) -> NDArray[np.integer[Any]]:
        """The class counts of the shards of one count page."""
        numbers = _cut(len(self), self.pages.shards_per_count_page)[page]
        return _read(self.storage, self.pages.count_pages[page], COUNT_DTYPES, (len(numbers), self.num_classes))

    def counts(self, number: int) -> NDArray[np.integer[Any]]:
        """The class counts of a shard. Keeps the last page that was read."""
        page, row = divmod(number, self.pages.shards_per_count_page)
        last = self._last_counts
        if last is None or last[0] != page:
            last = self._last_counts = page, self.count_page(page)
        found: NDArray[np.integer[Any]] = last[1][row]
        return found

    def _check_number(self, num_shards: int) -> None:
        pages = self.pages
        expected = [
            len(_cut(num_shards, pages.shards_per_page)),
            len(_cut(num_shards, pages.shards_per_count_page)) if self.num_classes else 0,
        ]
        found = [len(pages.pages), len(pages.count_pages)]
        if found != expected or not num_shards:
            raise ManifestError(
                f"{self.storage.url}: split {self.split!r}: {found[0]} pages and {found[1]} count pages for "
                f"{num_shards} shards, expected {expected[0]} and {expected[1]}; restore or rebuild the shard set"
            )


class ClassCounts(Sequence[int]):
    """The class counts of one shard of version 2, read when they are used. Pickles as a list."""

    def __init__(self, shards: PagedShards, number: int) -> None:
        self._shards, self._number = shards, number

    def __len__(self) -> int:
        return self._shards.num_classes

    @overload
    def __getitem__(self, label: int) -> int: ...
    @overload
    def __getitem__(self, label: slice) -> list[int]: ...
    def __getitem__(self, label: int | slice) -> int | list[int]:
        found: int | list[int] = self._shards.counts(self._number)[label].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (self[:],)


def _read(storage: Storage, page: PageFile, dtypes: Sequence[np.dtype[Any]], shape: tuple[int, ...]) -> NDArray[Any]:
    """The records of a page of one of these types."""
    url, advice = f"{storage.url}/{page.path}", "restore or rebuild the shard set"
    try:
        data = read_object(storage, page.path, page.num_bytes, page.crc32c, f"read twice; {advice}")
    except NotFound as error:
        raise ManifestError(f"{url}: this page of the manifest is missing; {advice}") from error
    except DamagedObject as error:
        raise ManifestError(f"a page of the manifest is damaged: {error}") from error
    start = 10 + int.from_bytes(data[8:10], "little")
    for dtype in dtypes:
        # NumPy's versions end the header with more or fewer spaces.
        is_header = data[:8] == _NPY_1_0 and data[10:start].rstrip() == _header(dtype, shape)[10:].rstrip()
        if is_header and len(data) == start + int(np.prod(shape)) * dtype.itemsize:
            return np.frombuffer(data, dtype, offset=start).reshape(shape)
    expected = " x ".join(map(str, shape))
    raise ManifestError(f"{url}: not the page that the manifest describes, of {expected} records; {advice}")


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()


def _cut(num_shards: int, size: int) -> list[range]:
    """The shards of each page."""
    return [range(start, min(start + size, num_shards)) for start in range(0, num_shards, size)]


def _crc_number(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big")
