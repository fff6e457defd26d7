"""Threads that cancel what they drop."""

import threading
from concurrent.futures import CancelledError

import pytest

from shardset.storage.many import Threads


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
