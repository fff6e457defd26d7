"""Threads that cancel what they drop, and ranges that share a request."""

import threading
from concurrent.futures import CancelledError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.storage.many import Threads, coalesce

RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=30).map(
    lambda pairs: sorted((start, start + size) for start, size in pairs)
)


def test_closed_threads_end_their_call_and_cancel_the_others():
    threads, begun, held = Threads("test", 1), threading.Event(), threading.Event()
    first = threads.call(lambda: (begun.set(), held.wait(600)))
    waiting = threads.call(lambda: None)
    begun.wait(600)
    threads.close()
    assert isinstance(waiting.exception(timeout=300), CancelledError)
    with pytest.raises(CancelledError):
        threads.call(lambda: None)
    held.set()
    assert first.result(timeout=300) == (None, True)
    threads.join()


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0, 4), (6, 8)], [2]),
        ([(0, 4), (7, 8)], [1, 1]),
        ([(0, 30), (30, 31)], [1, 1]),
        ([(0, 8), (1, 2), (9, 10)], [3]),
    ],
)
def test_neighbours_are_read_together_up_to_a_gap_and_a_size(ranges, expected):
    assert [run.stop - run.start for run in coalesce(ranges, max_gap=2, max_bytes=10)] == expected


@given(RANGES, st.integers(0, 20), st.integers(1, 100))
def test_every_range_is_in_one_read_and_each_read_is_within_its_limits(ranges, max_gap, max_bytes):
    runs = list(coalesce(ranges, max_gap=max_gap, max_bytes=max_bytes))
    assert [each for run in runs for each in ranges[run]] == ranges
    for run in runs:
        end = ranges[run][0][1]
        for start, stop in ranges[run][1:]:
            assert start - end <= max_gap
            end = max(end, stop)
        assert len(ranges[run]) == 1 or end - ranges[run][0][0] <= max_bytes
