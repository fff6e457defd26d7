"""Tables whose rows check themselves: what is written is read back, and no damage gets through."""

import io
import uuid

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardset.checksum import crc32c_of, crc32c_text
from shardset.errors import DamagedShard, NotFound
from shardset.format import table
from shardset.storage.open import open_storage
from tests.makers.objects import flipped, put
from tests.makers.once import DamagesOnce

DTYPE = np.dtype(
    [
        ("number", "<u8"),
        ("name", "S5"),
        ("place", [("offset", "<u8"), ("size", "<u4")]),
        table.CHECK,
    ]
)
NUM_ROWS = 10


def rows_of(num_rows: int) -> np.ndarray:
    return np.array([(n * n, b"n%d" % (n % 999), (n, 7), 0) for n in range(num_rows)], DTYPE)


def read(storage, wanted: range, num_rows: int = NUM_ROWS, crc32c: str = "") -> np.ndarray:
    return table.read_rows(
        storage, "t.npy", DTYPE, num_rows, wanted, crc32c=crc32c, advice="build it again"
    )


@pytest.fixture
def storage(tmp_path):
    """A disk, which knows no checksums."""
    found = open_storage(str(tmp_path))
    put(found, "t.npy", table.to_bytes(rows_of(NUM_ROWS)))
    return found


@given(st.integers(0, 300), st.data())
@settings(deadline=None)
def test_a_table_is_an_npy_file_and_any_of_its_rows_are_read_back(num_rows, data):
    stored, rows = open_storage(f"memory://{uuid.uuid4().hex}/set"), rows_of(num_rows)
    content = table.to_bytes(rows)
    loaded = np.load(io.BytesIO(content), allow_pickle=False)
    assert loaded.dtype == DTYPE
    assert loaded.tobytes() == table.sealed(rows).tobytes()
    assert len(content) == table.num_bytes(DTYPE, num_rows)
    put(stored, "t.npy", content)
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    found = read(stored, range(start, stop), num_rows, crc32c_text(crc32c_of(content)))
    assert found.tobytes() == loaded[start:stop].tobytes()


@given(st.integers(1, 83), st.integers(0, 10**12 - 1))
@example(9, 9)
@example(10, 10)
def test_a_header_is_that_of_numpy_and_as_long_for_any_number_of_rows(width, num_rows):
    dtype = np.dtype([("key", f"S{width}"), table.CHECK])
    out = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        out, {"descr": descr, "fortran_order": False, "shape": (num_rows,)}
    )
    assert table.header(dtype, num_rows) == out.getvalue()
    assert len(table.header(dtype, num_rows)) == len(table.header(dtype, 0))


def test_every_flipped_bit_of_a_row_is_found_and_touches_no_other(storage):
    content = storage.read("t.npy")
    start = len(table.header(DTYPE, NUM_ROWS)) + 4 * DTYPE.itemsize
    for place in range(DTYPE.itemsize):
        for bit in range(8):
            put(storage, "t.npy", flipped(content, start + place, 1 << bit))
            assert len(read(storage, range(4))) == 4
            assert len(read(storage, range(5, 10))) == 5
            with pytest.raises(
                DamagedShard, match=r"t\.npy: row 4 does not fit its check; build it again"
            ):
                read(storage, range(3, 6))


def test_a_row_at_the_place_of_another_is_found(storage):
    content, size = storage.read("t.npy"), DTYPE.itemsize
    start = len(content) - 2 * size
    put(storage, "t.npy", content[:start] + content[start + size :] + content[start : start + size])
    with pytest.raises(DamagedShard, match="row 8 does not fit"):
        read(storage, range(8, 10))


@pytest.mark.parametrize("at", [0, 40, -1])
def test_rows_that_are_damaged_once_are_asked_for_again(storage, at):
    again = DamagesOnce(storage, at=at)
    assert read(again, range(2, 7)).tobytes() == table.sealed(rows_of(NUM_ROWS))[2:7].tobytes()
    assert (again.num_reads, len(again.damaged)) == (2, 1)


@pytest.mark.parametrize("num_bytes", [0, 1, 200, -1])
@pytest.mark.parametrize("wanted", [range(3), range(9, 10)])
def test_a_cut_table_is_refused(storage, num_bytes, wanted):
    put(storage, "t.npy", storage.read("t.npy")[:num_bytes])
    with pytest.raises(
        DamagedShard, match=r"t\.npy: [0-9]+ bytes, expected [0-9]+; build it again"
    ):
        read(storage, wanted)


def test_another_table_is_refused_where_the_storage_knows_checksums():
    storage = open_storage(f"memory://{uuid.uuid4().hex}/set")
    put(storage, "t.npy", table.to_bytes(rows_of(NUM_ROWS)))
    with pytest.raises(DamagedShard, match="crc32c is"):
        read(storage, range(3), crc32c="AAAAAA==")
    storage.delete("t.npy")
    with pytest.raises(NotFound):
        read(storage, range(3))
