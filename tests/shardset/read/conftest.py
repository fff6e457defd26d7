import numpy as np
import pytest

from shardset.format.manifest import load
from shardset.read.indexes import ShardTable
from shardset.read.remote import RemoteReader
from tests.makers.reading import NUM_SAMPLES, RecordingStorage
from tests.makers.shardset import new_set, png_samples


@pytest.fixture
def recorded():
    """A recording shard set of 60 samples in 3 shards, and its manifest's split."""
    url = new_set(png_samples("train", NUM_SAMPLES, size=8), num_shards=3)
    manifest, storage, _ = load(url)
    return RecordingStorage(storage), manifest.split("train")


@pytest.fixture
def table(recorded):
    """The indexes of that set."""
    return ShardTable(*recorded)


@pytest.fixture
def reader(table):
    """A reader of its shards."""
    reader = RemoteReader(table)
    yield reader
    reader.close()


def at(table, *slots):
    """The addresses of the samples in these slots, each a shard and a position."""
    return table.addresses(*np.array(slots).T)
