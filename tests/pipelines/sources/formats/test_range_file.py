import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.formats.range_file import RangeFile
from shardset.errors import ChangedInput, SourceError
from shardset.storage.base import Stat
from shardset.storage.open import open_storage

CONTENT = bytes(range(256)) * 5


@pytest.fixture
def storage(tmp_path):
    (tmp_path / "a").write_bytes(CONTENT)
    return open_storage(str(tmp_path))


def opened(storage, window=64):
    return RangeFile(storage, storage.stat("a"), window)


@settings(max_examples=40)
@given(
    st.integers(1, 2000),
    st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 1400)), max_size=8),
)
def test_any_sequence_of_seeks_and_reads_gives_what_a_plain_file_gives(
    tmp_path_factory, window, steps
):
    folder = tmp_path_factory.mktemp("range")
    (folder / "a").write_bytes(CONTENT)
    file, plain = opened(open_storage(str(folder)), window), io.BytesIO(CONTENT)
    for position, size in steps:
        assert file.seek(-position, io.SEEK_END) == plain.seek(-position, io.SEEK_END)
        assert file.read(size) == plain.read(size)


def test_an_object_that_is_replaced_or_removed_while_it_is_read_is_an_error(storage, tmp_path):
    file = opened(storage)
    assert file.read(3) == CONTENT[:3]
    (tmp_path / "a").write_bytes(b"something else and shorter")
    with pytest.raises(ChangedInput, match="start again"):
        file.read()
    file = opened(storage)
    (tmp_path / "a").unlink()
    with pytest.raises(ChangedInput, match="removed"):
        file.read()


@pytest.mark.parametrize("window", [1, 64, 5000])
def test_what_is_read_from_start_to_end_is_compared_with_the_checksum_of_the_bucket(window):
    storage = open_storage("memory://range-file")
    storage.write("a", CONTENT)
    right = storage.stat("a")
    wrong = Stat(name="a", num_bytes=len(CONTENT), generation=right.generation, crc32c="AAAAAA==")
    assert b"".join(RangeFile(storage, right, window)) == CONTENT
    part = RangeFile(storage, wrong, window)
    part.seek(100)
    assert part.read() == CONTENT[100:]
    with pytest.raises(SourceError, match=r"expected the bucket's AAAAAA=="):
        b"".join(RangeFile(storage, wrong, window))
