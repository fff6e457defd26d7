"""A lock that is taken by each process for itself."""

import multiprocessing
import threading

from shardset.read.threads import ProcessLock


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


def test_of_the_threads_of_a_process_one_has_the_lock():
    lock, counts = ProcessLock(), []

    def count():
        for _ in range(1000):
            with lock:
                counts.append(len(counts))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == list(range(4000))
