"""A stream as a Grain IterDataset, with a state that Grain's and Orbax's checkpoints keep."""

import itertools
from collections.abc import Iterator
from typing import Any

from shardset.errors import ConfigError, brought_by

with brought_by("grain"):
    import grain

    from shardset.stream.spec import Batch
    from shardset.stream.stream import Stream


class StreamIterDataset(grain.IterDataset[Batch]):
    """The batches of a stream, epoch after epoch.

    The next epoch is read while the last one ends. Later stages may be any that Grain has; the
    stream decodes in threads, so `mp_prefetch` is not needed.

    Args:
        stream: The Stream.
        num_epochs: The number of epochs; None for ever.

    Raises:
        ConfigError: `num_epochs` is less than 1, or another process has another stream.

    Examples:
        >>> import shardset
        >>> from shardset.adapters.grain import StreamIterDataset
        >>> stream = shardset.Stream("shards", "train", batch_size=8, image_size=32)
        >>> batches = iter(StreamIterDataset(stream).map(lambda batch: batch["image"] / 255))
        >>> next(batches).shape
        (8, 32, 32, 3)
        >>> state = batches.get_state()
        >>> batches.set_state(state)
    """

    def __init__(self, stream: Stream, *, num_epochs: int | None = None) -> None:
        super().__init__()
        if num_epochs is not None and num_epochs < 1:
            raise ConfigError(f"num_epochs is {num_epochs}, expected at least 1, or None for ever")
        stream.check_same()
        self.stream, self.num_epochs = stream, num_epochs

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Raises ConfigError: `mp_prefetch` would divide the stream over its workers."""
        raise ConfigError(
            "mp_prefetch and other stages that divide a dataset can't divide a stream, whose"
            " batches are of all its samples; leave it out: the stream decodes in threads"
            " (num_threads=)"
        )

    def __iter__(self) -> "StreamIterator":
        return StreamIterator(self.stream, self.num_epochs)


class StreamIterator(grain.DatasetIterator[Batch]):
    """An iteration over a stream that can be saved and set back to any batch."""

    def __init__(self, stream: Stream, num_epochs: int | None) -> None:
        super().__init__()
        self._stream, self._num_epochs = stream, num_epochs
        self._position = 0, 0
        self._batches: Iterator[tuple[int, int, Batch]] | None = None

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._batches is None:
            epoch, step = self._position
            epochs = (
                itertools.count(epoch)
                if self._num_epochs is None
                else range(epoch, self._num_epochs)
            )
            size = len(self._stream)
            self._batches = self._stream.run(
                (each, range(step if each == epoch else 0, size)) for each in epochs
            )
        epoch, step, batch = next(self._batches)
        self._position = (epoch, step + 1) if step + 1 < len(self._stream) else (epoch + 1, 0)
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch; at the end of an epoch, the start of the next one.

        Returns:
            Numbers and strings by name.
        """
        return self._stream.state(*self._position)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a position: see `Stream.load_state_dict`.

        Args:
            state: The result of `get_state`.

        Raises:
            ConfigError: The state is of another set, seed or order.
        """
        self._position = self._stream.load_state_dict(state)
        self._batches = None

    def close(self) -> None:
        """Ends the threads that read ahead."""
        super().close()
        self._batches = None
