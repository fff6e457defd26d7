import uuid

import pytest

from shardset.format.manifest import load
from shardset.storage.open import open_storage
from tests.makers.reading import NUM_SAMPLES, RecordingStorage
from tests.makers.shardset import png_samples, write_shard_set


@pytest.fixture
def recorded():
    """A recording shard set of 60 samples in 3 shards, and its manifest's split."""
    url = f"memory://{uuid.uuid4().hex}/set"
    write_shard_set(
        open_storage(url), {"train": png_samples("train", NUM_SAMPLES, size=8)}, num_shards=3
    )
    manifest, storage, _ = load(url)
    return RecordingStorage(storage), manifest.split("train")
