"""The bytes of indexes before a first batch, as foreseen and as a reader reads them."""

import uuid

import numpy as np
import pytest

from pipelines.estimate.index_reads import index_range_gets
from pipelines.estimate.inputs import from_manifest
from pipelines.estimate.requests import cold_start
from shardset.format.tar import StoredSample
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.makers.shardset import write_shard_set

NUM_SAMPLES, NUM_SHARDS = 18_000, 3


@pytest.fixture(scope="module")
def url() -> str:
    """A set of three shards with large indexes; the last batch of it has pads."""
    url = f"memory://{uuid.uuid4().hex}/set"
    samples = [
        StoredSample(key=f"{number:07d}", fields=(("cls", b"1"),), label=1, source=number)
        for number in range(NUM_SAMPLES)
    ]
    write_shard_set(open_storage(url), {"train": samples}, num_shards=NUM_SHARDS)
    return url


@pytest.mark.parametrize(("world", "batch"), [(1, 64), (4, 64), (4, 1024)])
def test_a_reader_reads_the_bytes_of_indexes_that_were_foreseen(url, world, batch):
    stored, read = from_manifest(url), 0
    for rank in range(world):
        stream = Stream(url, "train", global_batch_size=batch, rank=rank, world_size=world, image=None)
        list(stream.run(iter([(0, range(1))])))
        read += stream.source.table.num_bytes_read
    foreseen = cold_start(stored, "train", stream.order, world).index_bytes
    # The last rows of an index may be fewer, and its header counts in part for each read.
    assert foreseen == pytest.approx(read, rel=0.02)


def test_ranges_of_indexes_are_at_most_the_blocks_of_an_epoch(url):
    split = from_manifest(url).splits["train"]
    assert index_range_gets(split, 512, 1) == NUM_SHARDS * (NUM_SAMPLES // NUM_SHARDS // 4 // 64 // 9)
    assert index_range_gets(split, 512, 8192) == int(NUM_SHARDS * np.float64(NUM_SAMPLES // NUM_SHARDS / 512))
