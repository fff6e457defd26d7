"""Objects to store, and short ways to store and list them."""

import multiprocessing
import os
import resource
from contextlib import contextmanager

from shardset.errors import ShardsetError
from shardset.testing import HELLO as HELLO
from shardset.testing import names as names
from shardset.testing import put as put

BIG = bytes(range(256)) * 4096  # 1 MiB


def flipped(data, at, bit=1):
    """The bytes with some bits of one of them flipped."""
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


@contextmanager
def file_size_limit(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def give_up_root():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def in_child(prepare, action):
    """What `action` raises in a forked process, after `prepare()` there: (class name, text)."""

    def run(results):
        prepare()
        try:
            results.put(("nothing", repr(action())))
        except ShardsetError as error:
            results.put((type(error).__name__, str(error)))

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=run, args=(results,))
    child.start()
    answer = results.get()
    child.join()
    return answer


class Clock:
    """Time that passes while somebody sleeps, and `step_s` whenever somebody looks."""

    def __init__(self, step_s=0.0):
        self.now = 0.0
        self.pauses = []
        self._step_s = step_s

    def __call__(self):
        self.now += self._step_s
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds
