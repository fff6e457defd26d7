"""What each process makes for itself, however it was started."""

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardset.errors import ConfigError
from shardset.per_process import PerProcess


class Made:
    """What a process has made, and by which."""

    def __init__(self, *key):
        self.key, self.pid, self.lock = key, os.getpid(), threading.Lock()


def made_by(results, kept):
    found = kept("a")
    with found.lock:
        results.put((found.pid == os.getpid(), kept("a") is found, len(kept.inherited)))


@pytest.mark.parametrize(
    ("method", "num_inherited"), [("fork", 1), ("spawn", 0), ("forkserver", 0)]
)
def test_a_process_makes_its_own_while_its_parent_holds_all_locks(method, num_inherited):
    context = multiprocessing.get_context(method)
    kept, results = PerProcess(Made), context.SimpleQueue()
    child = context.Process(target=made_by, args=(results, kept))
    ours = kept("a")
    with ours.lock, kept._lock:
        child.start()
    assert results.get() == (True, True, num_inherited)
    child.join()
    assert kept("a") is ours


def test_all_threads_get_the_same_for_each_key_until_it_is_taken():
    kept, started = PerProcess(Made), threading.Barrier(16)

    def ask(number):
        started.wait()
        return kept(number % 2)

    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(ask, range(16)))
    assert {each.key for each in found} == {(0,), (1,)}
    assert set(kept.take()) == found
    assert kept.take() == []
    assert kept(0) not in found


def test_what_could_not_be_made_is_made_at_the_next_call():
    errors = [ConfigError("not now")]

    def make():
        if errors:
            raise errors.pop()
        return "made"

    kept = PerProcess(make)
    with pytest.raises(ConfigError):
        kept()
    assert kept() == "made"
