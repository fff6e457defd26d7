import contextlib
import gzip
import io
import tarfile
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sources.formats.tar import read_members
from shardset.errors import SourceError
from tests.makers.cifar import tar_of

FILES = {"a": b"alpha" * 50, "b": bytes(range(256)) * 3, "c": b""}
TAR = tar_of(FILES, "folder")


def read(data: bytes, **options) -> dict[str, bytes]:
    return read_members(io.BytesIO(data), "x.tgz", ["a", "b", "c", "not there"], **options)


def test_the_named_members_are_read():
    assert read(gzip.compress(TAR)) == FILES
    assert read_members(io.BytesIO(gzip.compress(TAR)), "x", ["c", "d"]) == {"c": b""}


@pytest.mark.parametrize("name", FILES)
def test_a_member_is_read_without_what_is_behind_it(name):
    zipped = gzip.compress(tar_of(FILES | {"behind": bytes(4 << 20)}, "folder"), compresslevel=0)
    cut = io.BytesIO(zipped[: 2 << 20])
    assert read_members(cut, "x.tgz", [name], to_end=False) == {name: FILES[name]}


@given(st.integers(0, len(gzip.compress(TAR)) - 1), st.integers(1, 255))
def test_one_changed_byte_of_an_archive_is_an_error_or_changes_nothing(position, change):
    data = bytearray(gzip.compress(TAR, mtime=0))
    data[position % len(data)] ^= change
    with contextlib.suppress(SourceError):
        assert read(bytes(data)) == FILES


def test_a_member_that_claims_to_be_endless_is_an_error_at_once():
    with pytest.raises(SourceError, match=r"cut at byte 536870912 inside 'x'"):
        read(gzip.compress(header(tarfile.REGTYPE, 1 << 40) + TAR))


def test_what_is_behind_the_end_counts_for_the_limit():
    data = gzip.compress(TAR + bytes(100_000))
    with pytest.raises(SourceError, match=r"x\.tgz: unpacks to more than 50000 bytes"):
        read(data, max_bytes=50_000)


@given(st.lists(st.tuples(st.integers(0, len(TAR) - 1), st.integers(0, 255)), min_size=1, max_size=5))
def test_a_tar_made_to_confuse_gives_members_or_a_source_error(changes):
    data = bytearray(TAR)
    for position, byte in changes:
        data[position] = byte
        block = data[position - position % 512 : position - position % 512 + 512]
        if block[257:262] == b"ustar":  # a valid checksum, so that the reader goes on
            total = sum(block[:148]) + 8 * 32 + sum(block[156:])
            data[position - position % 512 + 148 : position - position % 512 + 156] = b"%06o\0 " % total
    with contextlib.suppress(SourceError):
        read(gzip.compress(bytes(data), compresslevel=0))


@given(st.integers(1, len(gzip.compress(TAR)) - 1))
def test_every_cut_of_an_archive_is_an_error(size):
    with pytest.raises(SourceError, match=r"x\.tgz: cut or damaged"):
        read(gzip.compress(TAR)[:size])


# --- headers that are made to fill the memory


def header(kind: bytes, num_bytes: int, name: str = "x") -> bytes:
    """A header of a tar, with a valid checksum."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, num_bytes
    return info.tobuf(tarfile.GNU_FORMAT)


MIB = 1 << 20


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE], ids=repr)
def test_a_header_that_unpacks_to_much_is_refused_before_it_is_read(kind):
    data = gzip.compress(header(kind, 16 * MIB) + bytes(16 * MIB) + TAR, compresslevel=1)
    tracemalloc.start()
    with pytest.raises(SourceError, match=r"x\.tgz: .*extension headers are longer than 1048576 bytes"):
        read(data)
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()


def test_many_members_are_not_kept():
    data = gzip.compress(5_000 * header(tarfile.REGTYPE, 0) + TAR, compresslevel=1)
    tracemalloc.start()
    assert read(data) == FILES
    assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    tracemalloc.stop()
