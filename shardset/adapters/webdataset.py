"""A webdataset pipeline over a shard set, so that code written for webdataset keeps working.

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
    from shardset.stream.presets import DEFAULT_SEED
    from shardset.stream.spec import StreamOptions
    from shardset.stream.stream import Stream

ROW_SIZE = 64  # samples of a process that are read together


class SamplePipeline(webdataset.DataPipeline, webdataset.FluidInterface):
    """A DataPipeline whose first stage is a SampleDataset; `pipeline` makes one.

    `.decode()`, `.map()` and the other stages return another SamplePipeline. `set_epoch`,
    `state_dict` and `load_state_dict` belong to the SampleDataset: the position is after the
    samples that later stages have taken, which is exact unless a stage holds some back, as
    `shuffle` does.

    Args:
        source: The first stage.
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
        """The batches of webdataset's `batched`, without its look-ahead of one sample.

        Args:
            batchsize: Samples in a batch.
            collation_fn: Makes a batch of a list of samples; None leaves the list.
            partial: Whether a last, smaller batch is given.
        """
        batches: SamplePipeline = self.compose(
            bound(_batched, size=batchsize, collate=collation_fn or list, keeps_last=partial)
        )
        return batches

    def listed(self, batchsize: int, partial: bool = True) -> "SamplePipeline":
        """Lists of samples.

        Args:
            batchsize: Samples in a list.
            partial: Whether a last, shorter list is given.
        """
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
    """The samples of a split as the first stage of a webdataset pipeline.

    Args:
        manifest_url: The set, as in `Stream`.
        split: The name of the split.
        seed: Determines the order; None is the stored order.
        rank: The number of this process, as in `Stream`.
        world_size: The number of processes, as in `Stream`.
        epoch: The number of the first epoch, from 0.
        **options: Other options of `Stream`. `fields` are all fields of the split by default.

    Returns:
        A SamplePipeline of dicts: `__key__`, `__url__`, `__id__`, and bytes by field.

    Raises:
        ConfigError: The options don't fit.
        ManifestError: There is no complete shard set or no such split.

    Examples:
        >>> from shardset.adapters.webdataset import pipeline
        >>> samples = pipeline("shards", "train").decode("rgb8").to_tuple("jpg", "cls")
        >>> image, label = next(iter(samples))
        >>> image.shape, image.dtype
        ((40, 50, 3), dtype('uint8'))
    """
    rank, world_size = which_process(rank, world_size)
    loaded = load_set(manifest_url)
    defaults: StreamOptions = {
        "fields": tuple(loaded.manifest.split(split).fields),
        "with_key": True,
    }
    stream = Stream(
        loaded,
        split,
        batch_size=ROW_SIZE,
        rank=rank,
        world_size=world_size,
        seed=seed,
        image=None,
        **(defaults | options),
    )
    return SamplePipeline(SampleDataset(stream, epoch))


def _batched(
    samples: Iterator[Any], *, size: int, collate: Callable[[list[Any]], Any], keeps_last: bool
) -> Iterator[Any]:
    while batch := list(itertools.islice(samples, size)):
        if len(batch) == size or keeps_last:
            yield collate(batch)
