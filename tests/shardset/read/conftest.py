import pytest

from shardset.format.manifest import load
from tests.makers.reading import NUM_SAMPLES, RecordingStorage
from tests.makers.shardset import new_set, png_samples


@pytest.fixture
def recorded():
    """A recording shard set of 60 samples in 3 shards, and its manifest's split."""
    url = new_set(png_samples("train", NUM_SAMPLES, size=8), num_shards=3)
    manifest, storage, _ = load(url)
    return RecordingStorage(storage), manifest.split("train")
