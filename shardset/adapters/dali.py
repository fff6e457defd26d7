"""A stream as the external source of an NVIDIA DALI pipeline. It needs nothing of DALI, only its protocol.

source = ExternalSource(stream, ("jpg", "label"))       # of Stream(..., image=None, fields=("jpg",))

@pipeline_def(batch_size=stream.batch_size, num_threads=4, device_id=0)
def decoded():
    encoded, labels = fn.external_source(source, num_outputs=2, batch=True, cycle="raise")
    return fn.decoders.image(encoded, device="mixed"), labels
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from shardset.errors import ConfigError
from shardset.stream.batch import Batch
from shardset.stream.stream import Stream


class ExternalSource:
    """Whole batches for `fn.external_source(source, num_outputs=len(names), batch=True, cycle="raise")`.

    Each batch is a tuple in the order of `names`: an array, or for a stored field a list of uint8 arrays, one for each
    sample. DALI begins an epoch with `iter` and takes the end as that of its own epoch, so each `reset` of the pipeline
    is the next epoch. Save and restore the stream itself, and count with the batches that DALI has prefetched: give
    `stream.state(epoch, step)` the step of your loop.

    Raises ConfigError for a name that the stream's batches do not have.
    """

    def __init__(self, stream: Stream, names: Sequence[str] = ("image", "label")) -> None:
        available = _names_of(stream)
        if missing := [name for name in names if name not in available]:
            raise ConfigError(f"batches of this stream have no {missing[0]!r}; they have {', '.join(available)}")
        self.stream, self.names = stream, tuple(names)
        self._batches: Iterator[Batch] = iter(())

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.stream)

    def __iter__(self) -> "ExternalSource":
        self._batches = iter(self.stream)
        return self

    def __next__(self) -> tuple[Any, ...]:
        batch = cast("dict[str, Any]", next(self._batches))
        return tuple(self._output(name, batch[name]) for name in self.names)

    def _output(self, name: str, values: Any) -> Any:
        if isinstance(values, np.ndarray):
            return values
        if None in values:
            raise ConfigError(f"a sample has no field {name!r}, and DALI takes none without; leave the field out")
        return [np.frombuffer(content, np.uint8) for content in values]


def _names_of(stream: Stream) -> list[str]:
    """What DALI can take of the stream's batches: arrays and stored fields. With a transform anything may be there."""
    image = [] if stream.spec.image is None else ["image"]
    flip = ["flip"] if stream.spec.image is not None and stream.spec.image.flip is True else []
    return [*image, "label", "weight", "id", *flip, *stream.spec.fields]
