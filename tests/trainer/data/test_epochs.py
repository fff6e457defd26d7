from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.order.selection import Selection
from tests.makers.training import STEPS, tiny_config
from trainer.data.epochs import DIGEST_MASK, SampleDigest, check_epoch, complete_epoch, steps_of
from trainer.data.splits import open_data
from trainer.errors import EpochMismatch


@given(st.permutations(range(30)), st.integers(0, 30))
def test_a_count_does_not_depend_on_order_or_on_how_hosts_share_the_samples(order, cut):
    parts = [np.array(part, dtype=np.int64) for part in (order[:cut], order[cut:])]
    assert SampleDigest().add(parts[0]).add(parts[1]) == complete_epoch(Selection(30))
    digests = [SampleDigest().add(part).digest for part in parts]
    assert sum(digests) & DIGEST_MASK == complete_epoch(Selection(30)).digest


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 1, 2, 2]])
def test_a_lost_repeated_or_strange_sample_is_an_error(ids):
    with pytest.raises(EpochMismatch, match="lost or repeated"):
        check_epoch(3, complete_epoch(Selection(4)), SampleDigest().add(np.array(ids)))


class Cut:
    """A stream that ends early, as a loader that swallowed an error does."""

    def __init__(self, steps: list[tuple[int, int]]) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return 4

    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
        return ((epoch, step, {}) for epoch, step in self.steps)

    def stop(self) -> None: ...


@pytest.mark.parametrize(
    ("steps", "message"),
    [([(0, 0), (0, 1)], "ended before step 2"), ([(0, 0), (0, 2)], "epoch 1 step 2 where step 1")],
)
def test_a_stream_that_ends_early_or_jumps_is_an_error(steps, message):
    stream: Any = Cut(steps)
    with pytest.raises(EpochMismatch, match=message):
        list(steps_of(stream, 0, 8))


@pytest.mark.parametrize(("start", "stop"), [(0, 14), (3, 5), (6, 8), (14, 14)])
def test_steps_continue_from_anywhere_and_over_epochs(manifest, start, stop):
    stream = open_data(tiny_config(manifest, "run"), 0, 1).train
    found = [(epoch, step) for epoch, step, _ in steps_of(stream, start, stop)]
    assert found == [divmod(step, STEPS) for step in range(start, stop)]
