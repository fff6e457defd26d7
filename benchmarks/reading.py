"""One run of a reader, measured from inside: its first batch, its rate, its processor time.

Needs no library.

python -m benchmarks.stream --one NAME '{"folder": ...}'
"""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BATCH, WORKERS = 256, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Where the same images lie in every reader's form, how many, and what a training image
    becomes.
    """

    folder: str
    kind: str
    num_samples: int

    @property
    def field(self) -> str:
        """Their extension."""
        return "jpg" if self.kind == "jpeg" else "png"

    @property
    def passes(self) -> int:
        """Epochs of a reader that does not decode: one is over before its start has ceased to
        count.
        """
        return 3 if self.kind == "jpeg" else 10

    @property
    def size(self) -> int:
        """Pixels of a side of a training image."""
        return 224 if self.kind == "jpeg" else 32


Contestant = Callable[[Data], Iterator[int]]
"""Gives the number of samples of each batch; a first 0 ends its preparations."""


def one(contestant: Contestant, data: Data, device_s: float) -> dict[str, float]:
    """An epoch (of a reader that does not decode, several): seconds to the first batch; samples a
    second of all that was read, its start too; CPU seconds for 1,000.

    `rate_after` and `wait` leave out the first batch: samples a second, and the part of the time
    spent waiting for a batch. After each batch a device works on it for `device_s`, in which the
    loop sleeps.
    """
    cpu, begun = _cpu_s(), time.perf_counter()
    batches = contestant(data)
    num_first = next(batches)
    if not num_first:
        cpu, begun = _cpu_s(), time.perf_counter()
        num_first = next(batches)
    first = time.perf_counter() - begun
    num_after, waited = 0, 0.0
    _work(device_s)
    while True:
        asked = time.perf_counter()
        count = next(batches, None)
        waited += time.perf_counter() - asked
        if count is None:
            break
        num_after += count
        _work(device_s)
    ended = time.perf_counter()
    del batches
    gc.collect()
    count, after = num_first + num_after, ended - begun - first
    return {
        "first_s": first,
        "rate": count / (ended - begun),
        "rate_after": num_after / after if num_after else 0.0,
        "wait": waited / after if num_after else 0.0,
        "cpu_s": 1000 * (_cpu_s() - cpu) / count,
        "num_samples": count,
    }


def _work(seconds: float) -> None:
    if seconds:  # a sleep of 0 takes 0.1 ms, longer than a sample
        time.sleep(seconds)


def main(contestants: dict[str, Contestant], words: list[str]) -> None:
    """`NAME DATA DEVICE_S`: prints the measurement as JSON."""
    name, data, device_s = words
    found = one(contestants[name], Data(**json.loads(data)), float(device_s))
    print(json.dumps(found), flush=True)


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
