"""A small shard set, and the streams over it whose batches every adapter must give."""

from functools import partial

import pytest

from shardset.decode.crops import PadCrop
from shardset.decode.image import ImageSpec
from shardset.stream.stream import Stream
from tests.makers.shardset import new_set, png_samples

RAW = {"image": None, "fields": ("png", "cls"), "with_key": True}


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """The URL of a set of 50 PNGs of 8 pixels: six full batches of 8, and one of 2 samples and 6
    pads.
    """
    url = str(tmp_path_factory.mktemp("set"))
    new_set(png_samples("train", 50, size=8), url, num_shards=3)
    return url


@pytest.fixture
def make(shards):
    """Makes a stream over the set."""
    image = ImageSpec(size=8, crop=PadCrop(1))
    one = partial(Stream, shards, "train", rank=0, world_size=1, num_threads=1)
    return partial(one, image=image, seed=7, global_batch_size=8)
