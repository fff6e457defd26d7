"""A stream as the external source of an NVIDIA DALI pipeline. It needs nothing of DALI, only its protocol.

source = ExternalSource(stream, ("jpg", "label"))       # of Stream(..., image=None, fields=("jpg",))

@pipeline_def(batch_size=stream.batch_size, num_threads=4, device_id=0)
def decoded():
    encoded, labels = fn.external_source(source, num_outputs=2, batch=True, cycle="raise")
    return fn.decoders.image(encoded, device="mixed"), labels
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardset.errors import ConfigError, brought_by

with brought_by("read"):
    from shardset.stream.batch import Batch
    from shardset.stream.stream import Stream


class ExternalSource:
    """Whole batches for `fn.external_source(source, num_outputs=len(names), batch=True, cycle="raise")`.

    Each batch is a tuple in the order of `names`: an array, or for a stored field a list of uint8 arrays, one for each
    sample. DALI calls `iter` at the start and at each `reset` of its pipeline: that is the next epoch. DALI prefetches,
    so `stream.state_dict()` is ahead of your loop; save `json.loads(stream.state(epoch, step).to_json())` with the step
    of your loop, which `stream.load_state_dict` takes.

    Raises ConfigError for a name that the stream's batches do not have, unless a transform makes them.
    """

    def __init__(self, stream: Stream, names: Sequence[str] = ("image", "label")) -> None:
        available = _names_of(stream)
        missing = [name for name in names if name not in available]
        if missing and stream.spec.transform is None:
            raise ConfigError(f"batches of this stream have no {missing[0]!r}; they have {', '.join(available)}")
        stream.check_same()
        self.stream, self.names = stream, tuple(names)
        self._batches: Iterator[Batch] = iter(())

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.stream)

    def __iter__(self) -> "ExternalSource":
        self._batches = iter(self.stream)
        return self

    def __next__(self) -> tuple[Any, ...]:
        batch = next(self._batches)
        return tuple(self._output(name, batch[name]) for name in self.names)

    def _output(self, name: str, values: Any) -> Any:
        if isinstance(values, np.ndarray):
            return values
        if None in values:
            raise ConfigError(f"a sample has no field {name!r}, and DALI takes none without; leave the field out")
        return [np.frombuffer(content, np.uint8) for content in values]


def _names_of(stream: Stream) -> list[str]:
    """What DALI can take of the stream's batches: arrays and stored fields."""
    image = [] if stream.spec.image is None else ["image"]
    flip = ["flip"] if stream.spec.image is not None and stream.spec.image.flip in (True, "alternating") else []
    return [*image, "label", "weight", "id", *flip, *stream.spec.fields]
