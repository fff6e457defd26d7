"""`shardset.open`: single samples by number and key, and the map-style dataset."""

import gc
import itertools
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest

import shardset
from shardset.errors import ConfigError, DamagedShard, ManifestError, UndecodableImage
from shardset.format.tar import StoredSample
from shardset.storage.open import open_storage
from tests.makers.documented import start
from tests.makers.shardset import (
    encode,
    image_sample,
    new_set,
    pixels,
    png_samples,
    put,
)

NUM_TRAIN = 31


@pytest.fixture(scope="module")
def shards(location):
    """The URL of a shard set."""
    samples = {
        "train": png_samples("train", NUM_TRAIN, size=8),
        "val": png_samples("val", 5, size=8),
    }
    return new_set(samples, location, num_shards=3)


@pytest.mark.parametrize("id_", [0, 10, 11, 30])
def test_a_sample_is_found_by_number_and_by_key(shards, id_):
    samples = shardset.open(shards, "train")
    for sample in (
        samples[id_],
        samples[f"train-{id_:06d}"],
        samples[id_ - NUM_TRAIN],
        samples[np.int64(id_)],
    ):
        assert (sample.id, sample.key, sample.label) == (id_, f"train-{id_:06d}", id_ % 10)
        assert sample.class_name == f"class {id_ % 10}"
        assert sample.bytes == sample.fields["png"] == encode(pixels(id_, 8, 8), "png")
        assert sample.fields["cls"] == str(id_ % 10).encode()
        assert np.array_equal(sample.image, pixels(id_, 8, 8))


def test_all_samples_come_in_the_order_of_their_ids(shards):
    samples = shardset.open(shards, "train")
    assert len(samples) == NUM_TRAIN
    assert [sample.id for sample in samples] == list(range(NUM_TRAIN))
    assert [sample.id for sample in samples.__getitems__([30, 2, "train-000011", 2])] == [
        30,
        2,
        11,
        2,
    ]
    assert samples.__getitems__([]) == []
    assert samples.classes == [f"class {label}" for label in range(10)]
    there = ["train-000003", "val-000003", -32, -31, 30, 31]
    assert [key in samples for key in there] == [True, False, False, True, True, False]


@pytest.mark.parametrize("number", [NUM_TRAIN, -NUM_TRAIN - 1])
def test_a_number_beyond_the_end_is_an_index_error(shards, number):
    with pytest.raises(IndexError, match=f"no sample {number} in split 'train' of 31 samples"):
        shardset.open(shards, "train")[number]


def test_a_program_that_ends_with_open_shards_ends_silently(tmp_path):
    new_set({"all": png_samples("all", 6, size=8)}, tmp_path)
    code = (
        f"import sys, shardset; stream = shardset.Stream({str(tmp_path)!r}, 'all', batch_size=2,"
        " image_size=8); batches = iter(stream); next(batches); samples ="
        " shardset.open(stream.spec.manifest_url); samples[0]; sys.keep = samples, batches; import"
        " shardset.read.local; shardset.read.local.os = None"
    )
    done = start([sys.executable, "-c", code], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("key", ["train-000011x", "", "zebra", "größe"])
def test_a_key_that_is_not_there_is_named_with_its_neighbours(shards, key):
    with pytest.raises(KeyError, match=f"no sample of split 'train' has the key '{key}'; "):
        shardset.open(shards, "train")[key]


def test_the_split_may_be_left_out_where_there_is_one(shards, tmp_path):
    new_set({"all": png_samples("all", 6, size=8)}, tmp_path)
    assert len(shardset.open(tmp_path)) == 6
    with pytest.raises(ConfigError, match="several splits, train, val; name one"):
        shardset.open(shards)
    with pytest.raises(ManifestError, match="no split 'test'"):
        shardset.open(shards, "test")


def collate(pairs):
    images, labels = zip(*pairs, strict=True)
    return np.stack(images), np.array(labels)


def test_an_index_error_of_a_transform_is_not_taken_for_the_end(shards):
    samples = shardset.open(shards, "train", transform=lambda sample: [][sample.id])
    with pytest.raises(IndexError):
        list(samples)


def pair(sample):
    return sample.image, sample.label


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_a_map_style_dataset_of_torch(tmp_path, workers):
    from torch.utils.data import DataLoader

    new_set(png_samples("train", 31, size=8), tmp_path, num_shards=3)
    samples: Any = shardset.open(tmp_path, transform=pair)  # has the methods of a torch Dataset
    assert samples[0][1] == 0  # opened here, and opened again in each worker
    loader = DataLoader(samples, batch_size=4, num_workers=workers, collate_fn=collate)
    ids = itertools.count()
    for images, labels in loader:
        for image, label, id_ in zip(images, labels, ids, strict=False):
            assert np.array_equal(image, pixels(id_, 8, 8))
            assert label == id_ % 10
            if id_ % 4 == 3:
                break


def test_a_copy_reads_for_itself(shards):
    samples = shardset.open(shards, "val", transform=pair)
    samples["val-000001"]
    copy = pickle.loads(pickle.dumps(samples))
    assert np.array_equal(copy["val-000001"][0], pixels(1, 8, 8))


def test_it_can_be_closed_and_read_again(shards):
    with shardset.open(shards, "val") as samples:
        assert samples[0].id == 0
    assert samples[1].id == 1
    samples.close()
    samples.close()


@pytest.mark.parametrize("is_in_cycle", [False, True])
def test_a_set_that_is_dropped_ends_its_threads(shards, is_in_cycle):
    before = set(threading.enumerate())
    samples = shardset.open(shards, "val")
    assert samples[0].id == 0
    if is_in_cycle:
        samples.transform = samples.__contains__
    del samples
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before


def test_damage_and_what_is_no_image_are_named(tmp_path):
    samples = [
        image_sample("all", 0, b"nothing", "png", 10),
        StoredSample(key="b", fields=(("json", b"{}"),), label=-1, serial=1),
    ]
    new_set({"all": samples}, tmp_path, num_shards=1)
    dataset = shardset.open(tmp_path)
    assert (dataset["b"].label, dataset["b"].class_name) == (-1, "")
    with pytest.raises(
        UndecodableImage, match=r"all-000000.tar: sample 'all-000000' at byte \d+: "
    ):
        dataset[0].image  # noqa: B018
    with pytest.raises(
        UndecodableImage, match=r"sample 'b' at byte \d+: it has no image among \['json'\]"
    ):
        dataset["b"].image  # noqa: B018
    storage = open_storage(str(tmp_path))
    tar = bytearray(storage.read("all/all-000000.tar"))
    tar[tar.index(b"nothing")] ^= 1
    put(storage, "all/all-000000.tar", bytes(tar))
    with pytest.raises(DamagedShard, match=r"sample 'all-000000' at byte \d+: crc32c is"):
        shardset.open(tmp_path)[0]
