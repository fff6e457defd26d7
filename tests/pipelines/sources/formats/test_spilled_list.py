"""Piles give back what was added, in order and as often as asked; units are cut from them."""

import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.formats import spilled_list as module
from pipelines.sources.formats.spilled_list import SpilledList, SpilledUnits
from shardset.errors import StorageError

ENTRIES = st.lists(st.tuples(st.text(), st.integers(-(2**63), 2**63 - 1), st.none() | st.text()).map(list))


def piled(entries: list[list], at_once: int, monkeypatch: pytest.MonkeyPatch) -> SpilledList:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    pile = SpilledList()
    for entry in entries:
        pile.add(entry)
    return pile


@settings(deadline=None)
@given(ENTRIES, st.integers(1, 5), st.integers(1, 7))
def test_entries_come_back_in_order_and_more_than_once(entries, at_once, size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        pile = piled(entries, at_once, monkeypatch)
        assert len(pile) == len(entries)
        assert list(zip(pile, pile, strict=True)) == list(zip(entries, entries, strict=True))
        units = SpilledUnits(pile, size, lambda number, some: {"number": number, "entries": some})
        pieces = [entries[start : start + size] for start in range(0, len(entries), size)] or [[]]
        for _ in range(2):
            assert list(units) == [{"number": number, "entries": some} for number, some in enumerate(pieces)]
        assert len(units) == len(pieces)


def test_a_pile_does_not_stay_in_memory(monkeypatch):
    pile = piled([["name", number] for number in range(1000)], 10, monkeypatch)
    assert len(pile._last) < 10
    assert list(pile)[-1] == ["name", 999]


def test_a_temporary_folder_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match=r"the temporary folder .*gone"):
        SpilledList()
