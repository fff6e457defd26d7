"""What a run takes from a stream: its steps, counted over epochs, and whether an epoch had exactly
the samples that it should.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from shardset.order.permutation import derive_key, hash64
from shardset.order.selection import Selection
from shardset.stream.spec import Batch
from trainer.errors import EpochMismatch

DIGEST_MASK = (1 << 48) - 1
"""48 bits, so that sums over hosts stay within the integers that every runtime can sum."""

IDS_AT_ONCE = 1 << 16
"""Ids that are hashed together: their hashes stay in the processor's cache, whatever the size of
the split.
"""

_KEY = derive_key(0, "samples of an epoch")

Step = tuple[int, int, dict[str, Any]]
"""(epoch, step in the epoch, batch by field)."""


class BatchSource(Protocol):
    """A stream as the training loop uses it (see shardset/stream/stream.py)."""

    def __len__(self) -> int: ...
    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[tuple[int, int, Batch]]: ...
    def state(self, epoch: int, step: int) -> Any: ...
    def load_state_dict(self, state: Any) -> object: ...
    def stop(self) -> None: ...


def order_of(stream: BatchSource, epoch: int, step: int) -> str | None:
    """The order of a stream at a position, as JSON; None for synthetic data."""
    state = stream.state(epoch, step)
    return None if state is None else msgspec.json.encode(state).decode()


@dataclass(frozen=True, slots=True)
class SampleDigest:
    """The number of samples, and a digest of their ids: the sum of their hashes, in whatever order
    they come.
    """

    samples: int = 0
    digest: int = 0

    def add(self, ids: np.ndarray) -> "SampleDigest":
        """The digest of these samples and the samples with the ids."""
        hashes = hash64(_KEY, np.asarray(ids, dtype=np.int64)) >> np.uint64(16)
        digest = self.digest + int(hashes.sum(dtype=np.uint64))
        return SampleDigest(self.samples + len(ids), digest & DIGEST_MASK)

    @property
    def text(self) -> str:
        """The digest as 12 hexadecimal digits."""
        return f"{self.digest:012x}"


def complete_epoch(selection: Selection, repeats: int = 1) -> SampleDigest:
    """The digest of a complete epoch over some ids, each of which it has so many times."""
    once = SampleDigest()
    for start in range(0, selection.num_kept, IDS_AT_ONCE):
        numbers = np.arange(start, min(start + IDS_AT_ONCE, selection.num_kept))
        once = once.add(selection.id_of(numbers))
    return SampleDigest(once.samples * repeats, once.digest * repeats & DIGEST_MASK)


def check_epoch(epoch: int, expected: SampleDigest, seen: SampleDigest) -> None:
    """Raises EpochMismatch unless the run has trained on exactly the samples that are expected."""
    if seen == expected:
        return
    raise EpochMismatch(
        f"epoch {epoch + 1}: trained on {seen.samples} samples with key digest {seen.text}, "
        f"expected {expected.samples} with {expected.text}: samples were lost or repeated; "
        "don't trust this run, and report it with its logs"
    )


def steps_of(stream: BatchSource, start: int, stop: int) -> Iterator[Step]:
    """Yields (epoch, step, batch) for the steps [start, stop) of a run, counted over epochs.

    Prefetches across the end of an epoch. Raises EpochMismatch if the stream skips a step or ends
    early.
    """
    due = start
    size = len(stream)
    epochs = range(start // size, -(-stop // size))
    spans = (
        (epoch, range(max(0, start - epoch * size), min(size, stop - epoch * size)))
        for epoch in epochs
    )
    for epoch, step, batch in stream.run(spans):
        if (epoch, step) != divmod(due, size):
            raise EpochMismatch(
                f"the stream yielded epoch {epoch + 1} step {step} where step {due} of the run"
                " was due"
            )
        yield epoch, step, batch
        due += 1
    if due != stop:
        raise EpochMismatch(f"the stream ended before step {due} of the run, expected {stop}")
