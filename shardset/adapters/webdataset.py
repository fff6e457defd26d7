"""A webdataset pipeline over a shard set, so that code written for webdataset keeps working.

    dataset = pipeline("gs://bucket/photos", "train").decode("rgb8").to_tuple("jpg",
    "cls").batched(64)

The manifest takes the place of the list of tars: samples come verified and in the stream's order,
divided exactly among processes and DataLoader workers, each once an epoch. They are shuffled
already, so `.shuffle()` is not needed.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial as bound
from typing import Any, Unpack

from shardset.errors import brought_by
from shardset.stream.world import which_process

with brought_by("webdataset"):
    import webdataset

    from shardset.adapters.torch import SampleDataset
    from shardset.format.manifest import SetUrl, load_set
    from shardset.stream.defaults import DEFAULT_SEED
    from shardset.stream.spec import StreamOptions
    from shardset.stream.stream import Stream

ROW_SIZE = 64
"""Samples of a process that are read together."""


class SamplePipeline(webdataset.DataPipeline, webdataset.FluidInterface):
    """A DataPipeline whose first stage is a SampleDataset; `.decode()`, `.map()` and the others
    return another one.

    `set_epoch`, `state_dict` and `load_state_dict` are those of the SampleDataset: the position is
    that of the samples that later stages have taken, which is exact unless a stage holds some back,
    as `shuffle` does.
    """

    def __init__(self, source: SampleDataset) -> None:
        super().__init__(source)
        self.set_epoch = source.set_epoch
        self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        # DataPipeline begins with the first sample; a state saved before that would have the last
        # epoch.
        samples: Iterator[Any] = self.iterator1() if self.repetitions == 1 else super().__iter__()
        return samples

    def batched(
        self,
        batchsize: int,
        collation_fn: Callable[[list[Any]], Any] | None = webdataset.filters.default_collation_fn,
        partial: bool = True,
    ) -> "SamplePipeline":
        """The batches of webdataset's `batched`, which takes one more sample before it gives a
        batch; this doesn't.
        """
        batches: SamplePipeline = self.compose(
            bound(_batched, size=batchsize, collate=collation_fn or list, keeps_last=partial)
        )
        return batches

    def listed(self, batchsize: int, partial: bool = True) -> "SamplePipeline":
        """Lists of samples."""
        return self.batched(batchsize, None, partial)


def pipeline(
    manifest_url: SetUrl,
    split: str,
    *,
    seed: int | None = DEFAULT_SEED,
    rank: int | None = None,
    world_size: int | None = None,
    epoch: int = 0,
    **options: Unpack[StreamOptions],
) -> SamplePipeline:
    """The samples of a split as the first stage of a webdataset pipeline, with all fields unless
    `fields` names some.

    `seed=None` is the stored order. `rank` and `world_size` are those of Stream, and so are the
    `options`.
    """
    rank, world_size = which_process(rank, world_size)
    loaded = load_set(manifest_url)
    own: StreamOptions = {"fields": tuple(loaded.manifest.split(split).fields), "with_key": True}
    stream = Stream(
        loaded,
        split,
        batch_size=ROW_SIZE,
        rank=rank,
        world_size=world_size,
        seed=seed,
        image=None,
        **(own | options),
    )
    return SamplePipeline(SampleDataset(stream, epoch))


def _batched(
    samples: Iterator[Any], *, size: int, collate: Callable[[list[Any]], Any], keeps_last: bool
) -> Iterator[Any]:
    while batch := list(itertools.islice(samples, size)):
        if len(batch) == size or keeps_last:
            yield collate(batch)
