"""A spilled list gives back what was added, in order and as often as asked;
units are cut from it.
"""

import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.formats import spilled_list
from pipelines.sources.formats.spilled_list import SpilledList, spilled_units
from shardset.errors import StorageError

ENTRIES = st.lists(
    st.tuples(st.text(), st.integers(-(2**63), 2**63 - 1), st.none() | st.text()).map(list)
)


@settings(deadline=None, max_examples=30)
@given(ENTRIES, st.integers(1, 50), st.integers(1, 7))
def test_entries_come_back_in_order_and_more_than_once(entries, num_bytes, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spilled_list, "READ_BYTES", num_bytes)
        check_entries(entries, size)


def check_entries(entries, size):
    spilled = SpilledList()
    for entry in entries:
        spilled.add(entry)
    assert len(spilled) == len(entries)
    assert list(zip(spilled, spilled, strict=True)) == list(zip(entries, entries, strict=True))
    units = spilled_units(spilled, size)
    pieces = [entries[start : start + size] for start in range(0, len(entries), size)] or [[]]
    for _ in range(2):
        assert list(units) == [{"entries": some} for some in pieces]
    assert len(units) == len(pieces)


def test_a_temporary_folder_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match=r"the temporary folder .*gone"):
        SpilledList()
