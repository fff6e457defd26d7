"""Threads that cancel what they drop, and a lock that each process takes for itself."""

import multiprocessing
import pickle
import threading
from concurrent.futures import CancelledError

import pytest

from shardset.read.threads import ProcessLock, Threads


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


def test_a_lock_that_is_held_during_a_fork_is_free_in_the_child():
    lock = ProcessLock()

    def take_it():
        with lock:
            pass

    child = multiprocessing.get_context("fork").Process(target=take_it)
    with lock:
        child.start()
    child.join(600)
    code = child.exitcode
    child.kill()
    assert code == 0


def test_a_copy_of_a_held_lock_is_free():
    lock = ProcessLock()
    with lock, pickle.loads(pickle.dumps(lock)):
        pass
