import io

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

from shardset.adapters.torch import BatchDataset, SampleDataset
from shardset.decode.crops import PadCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.makers.shardset import pixels, png_samples, write_shard_set

PADDED = ImageSpec(size=8, crop=PadCrop(1))
RAW = {"image": None, "fields": ("png", "cls"), "with_key": True}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("set"))
    write_shard_set(open_storage(url), {"train": png_samples("train", 50, size=8)}, num_shards=3)
    return url


def make(url, **options):
    choices = {
        "global_batch_size": 8,
        "rank": 0,
        "world_size": 1,
        "seed": 7,
        "image": ImageSpec(size=8, crop=PadCrop(1)),
    }
    return Stream(url, "train", **{**choices, "num_threads": 1, **options})


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 2])
def test_a_loader_with_any_number_of_workers_gives_the_streams_batches_in_order(shards, workers, start):
    stream = make(shards)
    dataset = BatchDataset(stream, epoch=2, start_step=start)
    found = list(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert len(found) == len(dataset) == len(stream) - start
    for batch, expected in zip(found, stream.epoch(2, start), strict=True):
        assert all(torch.equal(batch[name], torch.from_numpy(expected[name])) for name in expected)


@pytest.mark.parametrize("make_dataset", [BatchDataset, SampleDataset])
def test_a_start_that_no_epoch_has_is_refused(shards, make_dataset):
    stream = make(shards, **RAW)
    assert list(make_dataset(stream, 0, len(stream))) == []
    for start in (-1, len(stream) + 1):
        with pytest.raises(ConfigError, match=f"step {start} of an epoch"):
            make_dataset(stream, 0, start)


@pytest.mark.slow
def test_workers_that_are_spawned_read_the_same(shards):
    stream = make(shards)
    found = list(DataLoader(BatchDataset(stream), batch_size=None, num_workers=2, multiprocessing_context="spawn"))
    assert [batch["id"].tolist() for batch in found] == [batch["id"].tolist() for batch in stream.epoch(0)]


def test_a_webdataset_pipeline_gets_every_sample_once(shards):
    pipeline = webdataset.DataPipeline(SampleDataset(make(shards, **RAW)), webdataset.decode("rgb8"))
    samples = list(pipeline)
    assert sorted(sample["__id__"] for sample in samples) == list(range(50))
    for sample in samples:
        assert sample["__key__"] == f"train-{sample['__id__']:06d}"
        assert sample["__url__"].endswith(".tar")
        assert sample["cls"] == sample["__id__"] % 10
        assert np.array_equal(sample["png"], pixels(sample["__id__"], 8, 8))


def test_replicas_share_the_samples_of_a_webdataset_pipeline(shards):
    parts = [
        [sample["__id__"] for sample in SampleDataset(make(shards, rank=rank, world_size=4, **RAW))]
        for rank in range(4)
    ]
    assert sorted(id_ for part in parts for id_ in part) == list(range(50))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_worker_of_a_loader_gives_the_samples_of_its_steps_in_order(shards, workers):
    stream = make(shards, **RAW)
    steps = [batch["id"][batch["weight"] == 1].tolist() for batch in stream.epoch(0)]
    loader = DataLoader(SampleDataset(stream), batch_size=None, num_workers=workers)
    found = [sample["__id__"] for sample in loader]
    assert len(found) == 50
    for number in range(max(1, workers)):
        own = [id_ for step in steps[number :: max(1, workers)] for id_ in step]
        assert [id_ for id_ in found if id_ in own] == own


def test_samples_keep_their_bytes(shards):
    sample = next(iter(SampleDataset(make(shards, **RAW))))
    assert Image.open(io.BytesIO(sample["png"])).size == (8, 8)


def test_samples_of_a_decoding_stream_are_refused(shards):
    with pytest.raises(ConfigError, match="image=None"):
        SampleDataset(make(shards))
