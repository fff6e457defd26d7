import numpy as np
import pytest
import webdataset
from torchdata.stateful_dataloader import StatefulDataLoader

import shardset
from pipelines.check.verify import verify
from shardset.adapters.webdataset import pipeline
from tests.makers.images import image_bytes
from tests.makers.shardset import pixels

NUM_SAMPLES = 50


def ids_of(samples):
    return [sample["__id__"] for sample in samples]


def test_stages_of_webdataset_get_every_sample_once(shards):
    dataset = (
        pipeline(shards, "train")
        .decode("rgb8")
        .map(lambda sample: {**sample, "doubled": 2 * sample["cls"]})
    )
    assert isinstance(dataset, webdataset.DataPipeline)
    samples = list(dataset)
    assert sorted(ids_of(samples)) == list(range(NUM_SAMPLES))
    for sample in samples:
        assert sample["__key__"] == f"train-{sample['__id__']:06d}"
        assert sample["doubled"] == 2 * (sample["__id__"] % 10)
        assert np.array_equal(sample["png"], pixels(sample["__id__"], 8, 8))


def test_batches_are_those_of_the_samples(shards):
    plain = list(pipeline(shards, "train").decode("rgb8").to_tuple("png", "cls"))
    batches = list(pipeline(shards, "train").decode("rgb8").to_tuple("png", "cls").batched(16))
    assert [len(labels) for _, labels in batches] == [16, 16, 16, 2]
    assert np.array_equal(
        np.concatenate([np.stack(images) for images, _ in batches]), [image for image, _ in plain]
    )


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (3, 0), (3, 2)])
def test_samples_are_divided_exactly_among_processes_and_workers(shards, world, workers):
    loaders = [
        webdataset.WebLoader(
            pipeline(shards, "train", rank=rank, world_size=world),
            batch_size=None,
            num_workers=workers,
        )
        for rank in range(world)
    ]
    parts = [ids_of(loader) for loader in loaders]
    assert sorted(id_ for part in parts for id_ in part) == list(range(NUM_SAMPLES))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_each_further_iteration_is_the_next_epoch(shards):
    dataset = pipeline(shards, "train")
    first, second = ids_of(dataset), ids_of(dataset)
    assert first != second
    assert sorted(first) == sorted(second)
    dataset.set_epoch(0)
    assert ids_of(dataset) == first


@pytest.mark.parametrize("num_taken", [1, 33])
def test_a_pipeline_goes_on_where_it_was_saved(shards, num_taken):
    dataset = pipeline(shards, "train").decode("rgb8")
    samples = iter(dataset)
    for _ in range(num_taken):
        next(samples)
    again = pipeline(shards, "train").decode("rgb8")
    again.load_state_dict(dataset.state_dict())
    assert ids_of(again) == ids_of(samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_behind_batches(shards, workers):
    def loader_of():
        dataset = (
            pipeline(shards, "train")
            .map(lambda sample: sample["__id__"])
            .batched(4, collation_fn=list)
        )
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    loader, again = loader_of(), loader_of()
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    again.load_state_dict(loader.state_dict())
    assert list(again) == list(batches)


def test_the_stored_order_is_that_of_the_ids(shards):
    assert ids_of(pipeline(shards, "train", seed=None, num_lanes=1)) == list(range(NUM_SAMPLES))


def test_some_fields_may_be_chosen(shards):
    sample = next(iter(pipeline(shards, "train", fields=("cls",))))
    assert "png" not in sample
    assert sample["cls"] == str(sample["__id__"] % 10).encode()


NUMBERS = {"a": np.float32(1.5), "b": np.int64(3), "c": np.bool_(True), "d": np.arange(2)}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("emb.npy", np.arange(6, dtype=np.float32).reshape(2, 3), None),
        ("emb.npy", np.arange(8.0)[::2], None),
        ("emb.npy", np.float64(0.1), None),
        ("emb.npy", np.array([(1, 2.5)], [("a", "<i4"), ("b", ">f8")]), None),
        ("txt", "ein Bär", "ein Bär"),
        ("json", {"a": [1, None]}, {"a": [1, None]}),
        ("meta.json", '{"a": 1.0}', {"a": 1}),
        ("json", bytearray(b"[1, 2]"), [1, 2]),
        ("json", NUMBERS, {"a": 1.5, "b": 3, "c": True, "d": [0, 1]}),
        ("bin", memoryview(b"as it is"), b"as it is"),
        ("bin", bytearray(b"as it is"), b"as it is"),
    ],
)
def test_stock_webdataset_decodes_what_a_field_was_given(tmp_path, field, value, expected):
    image = bytearray(image_bytes(0, "jpg"))
    with shardset.Writer(tmp_path / "set") as writer:
        writer.write(image=image, fields={field: value})
    tar = str(tmp_path / "set/train/train-000000.tar")
    [sample] = webdataset.WebDataset(tar, shardshuffle=False).decode()
    if expected is None:
        assert sample[field].dtype == np.asarray(value).dtype
        assert np.array_equal(sample[field], value)
    else:
        assert sample[field] == expected
    stored = shardset.open(tmp_path / "set")[0]
    assert stored.fields["jpg"] == image
    if isinstance(value, str):
        assert stored.fields[field] == value.encode()
    assert verify(str(tmp_path / "set"), deep=True).ok
