import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardset.errors import DamagedShard
from trainer.data.device_feed import DEPTH, DeviceFeed


def batches(num, error=None):
    for step in range(num):
        yield (
            0,
            step,
            {
                "image": np.zeros((2, 1, 1, 3), np.uint8),
                "id": np.full(2, step),
                "weight": np.ones(2),
            },
        )
    if error is not None:
        raise error


def test_an_error_of_the_source_or_the_device_is_raised_where_the_batch_is_missing():
    # torch_xla's loader would end here without an error: a damaged shard as a short epoch.
    with DeviceFeed(batches(3, DamagedShard("bytes differ")), dict) as feed:
        iterator = iter(feed)
        assert [next(iterator).step for _ in range(3)] == [0, 1, 2]
        with pytest.raises(DamagedShard, match="bytes differ"):
            next(iterator)

    def refuse(_: Any) -> Any:
        raise RuntimeError("out of memory")

    with DeviceFeed(batches(3), refuse) as feed, pytest.raises(RuntimeError, match="out of memory"):
        next(iter(feed))


def test_batches_arrive_in_order_and_it_runs_ahead_by_no_more_than_its_depth():
    pulled = []

    def counted() -> Iterator[tuple[int, int, dict[str, Any]]]:
        for item in batches(50):
            pulled.append(item[1])
            yield item

    with DeviceFeed(counted(), dict) as feed:
        iterator = iter(feed)
        assert [next(iterator).ids.tolist() for _ in range(5)] == [
            [step, step] for step in range(5)
        ]
        # The queue, one in the thread's hands, one that it may be asking for.
        assert len(pulled) <= 5 + DEPTH + 2


def test_closing_it_early_ends_its_thread_and_a_source_that_waits():
    before, told = set(threading.enumerate()), threading.Event()

    def waiting() -> Iterator[tuple[int, int, dict[str, Any]]]:
        yield from batches(1)
        told.wait(60)

    with DeviceFeed(waiting(), dict, told.set) as feed:
        next(iter(feed))
    assert told.is_set()
    assert set(threading.enumerate()) <= before


def test_who_gives_up_while_it_waits_gets_the_batches_that_are_there_and_no_more():
    told, asked = threading.Event(), threading.Event()

    def waiting() -> Iterator[tuple[int, int, dict[str, Any]]]:
        yield from batches(2)
        asked.set()
        told.wait(60)

    with DeviceFeed(waiting(), dict, told.set, asked.is_set) as feed:
        assert [fed.step for fed in feed] == [0, 1]
        assert feed.gave_up


def test_a_small_share_is_filled_up_with_repeats_of_weight_0():
    images, weights = (
        np.arange(3 * 4, dtype=np.uint8).reshape(3, 4),
        np.array([1, 1, 0], np.float32),
    )
    batch = {
        "image": images,
        "label": np.arange(3),
        "weight": weights,
        "id": np.arange(3),
        "key": ["a", "b", "c"],
    }
    with DeviceFeed(iter([(0, 0, batch)]), dict, num_rows=5) as feed:
        [fed] = feed
    assert fed.tensors["image"].tolist() == images[[0, 1, 2, 0, 1]].tolist()
    assert fed.tensors["label"].tolist() == [0, 1, 2, 0, 1]
    assert fed.tensors["weight"].tolist() == [1, 1, 0, 0, 0]
    assert weights.tolist() == [1, 1, 0]
    assert (fed.ids.tolist(), fed.weights.tolist()) == ([0, 1, 2], [1, 1, 0])
