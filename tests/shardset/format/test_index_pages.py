"""Checksums of the pages of large indexes: they make that of the index, and show which rows are whole."""

import io

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.checksum import crc32c_of, crc32c_text, joined_crc32c
from shardset.format.index import index_dtype, index_to_bytes
from shardset.format.index_pages import (
    ENTRY,
    LARGE_BYTES,
    ROWS_PER_PAGE,
    IndexPages,
    entries_of,
    file_bytes,
    first_entries,
)
from shardset.format.manifest import IndexFile
from shardset.storage.open import open_storage
from tests.makers.shardset import png_samples, write_shard_set

FIELDS = ["jpg", "cls"]


def index_of(num_samples: int, key_bytes: int = 9) -> bytes:
    """An index of rows of any bytes."""
    dtype = index_dtype(FIELDS, key_bytes)
    numbers = np.arange(num_samples * dtype.itemsize, dtype=np.uint64)
    return index_to_bytes(((numbers * numbers) >> 7).astype(np.uint8).view(dtype))


def listed(data: bytes) -> IndexFile:
    return IndexFile(path="a.idx.npy", num_bytes=len(data), crc32c=crc32c_text(crc32c_of(data)))


def pages_of(data: bytes, num_samples: int, entries: bytes | None = None) -> IndexPages | None:
    return IndexPages.from_entries(entries_of(data) if entries is None else entries, listed(data), num_samples, FIELDS)


@given(st.lists(st.binary(max_size=200)))
def test_the_checksums_of_pieces_make_that_of_all(pieces):
    assert joined_crc32c((crc32c_of(piece), len(piece)) for piece in pieces) == crc32c_of(*pieces)


@settings(max_examples=30, deadline=None)
@given(st.integers(1900, 2300), st.integers(1, 83))
def test_the_pages_of_a_large_index_are_its_rows_for_any_size_of_index_and_keys(num_samples, key_bytes):
    data = index_of(num_samples, key_bytes)
    if len(data) <= LARGE_BYTES:
        assert entries_of(data) == b""
        return
    pages = pages_of(data, num_samples)
    assert pages is not None
    start, stop = pages.byte_range(0, len(pages.crcs))
    assert stop == len(data)
    assert np.frombuffer(data[start:], pages.dtype).tolist() == np.frombuffer(data[start:stop], pages.dtype).tolist()
    assert pages.dtype == index_dtype(FIELDS, key_bytes)
    assert pages.fits(0, data[start:])
    last = len(pages.crcs) - 1
    assert pages.fits(last, data[slice(*pages.byte_range(last, last + 1))])
    assert not pages.fits(last - 1, data[slice(*pages.byte_range(last, last + 1))])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_damaged_byte_of_a_page_is_found_in_its_page_only(draw):
    data = index_of(2100)
    pages = pages_of(data, 2100)
    start, _ = pages.byte_range(0, 1)
    place, bit = draw.draw(st.integers(start, len(data) - 1)), draw.draw(st.integers(0, 7))
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    own = (place - start) // (ROWS_PER_PAGE * pages.dtype.itemsize)
    for page in {0, own, max(0, own - 1), len(pages.crcs) - 1}:
        piece = bytes(damaged[slice(*pages.byte_range(page, page + 1))])
        assert pages.fits(page, piece) == (page != own)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_damaged_bit_of_the_checksums_is_found(draw):
    data = index_of(2100)
    entries = bytearray(entries_of(data))
    entries[draw.draw(st.integers(0, len(entries) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert pages_of(data, 2100, bytes(entries)) is None


def test_the_checksums_of_another_index_are_refused():
    data = index_of(2100)
    other = msgspec.structs.replace(listed(data), crc32c="AAAAAA==")
    assert IndexPages.from_entries(entries_of(data), other, 2100, FIELDS) is None
    assert pages_of(data, 2100, entries_of(index_of(2101))[: len(entries_of(data))]) is None


def test_checksums_are_frozen():
    # A change needs another name for the files: readers of this version would read whole indexes for ever.
    start, _, *pages = np.frombuffer(entries_of(index_of(2100)), ENTRY).tolist()
    assert (start, pages[0], pages[-1], len(pages)) == (384, 359733840, 3618174177, 33)
    assert file_bytes([b"abcd", b"", b"efgh"])[128:] == b"abcdefgh"
    assert np.load(io.BytesIO(file_bytes([b"abcd"])), allow_pickle=False).tolist() == [0x64636261]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_small_indexes_have_no_checksums_and_their_sets_no_file(num_shards):
    storage = open_storage(f"memory://no-index-pages-{num_shards}/set")
    split = write_shard_set(storage, {"train": png_samples("train", 9, size=2)}, num_shards=num_shards).split("train")
    assert first_entries(split).tolist() == [0] * (num_shards + 1)
    assert not [stat.name for stat in storage.list() if "pages" in stat.name]
