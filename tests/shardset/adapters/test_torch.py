from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from shardset.adapters.torch import BatchDataset, SampleDataset, TensorStream, as_detections
from shardset.errors import ConfigError
from shardset.stream.stream import Stream
from tests.makers.reading import all_same
from tests.shardset.adapters.conftest import RAW


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_loader_with_any_number_of_workers_gives_the_streams_batches_in_order(make, workers):
    stream = make()
    dataset = BatchDataset(stream, epoch=2)
    found = list(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert len(found) == len(dataset) == len(stream)
    for batch, expected in zip(found, stream.epoch(2), strict=True):
        assert all(torch.equal(batch[name], torch.from_numpy(expected[name])) for name in expected)


@pytest.mark.slow
def test_workers_that_are_spawned_read_the_same(make):
    stream = make()
    found = list(
        DataLoader(
            BatchDataset(stream), batch_size=None, num_workers=2, multiprocessing_context="spawn"
        )
    )
    assert [batch["id"].tolist() for batch in found] == [
        batch["id"].tolist() for batch in stream.epoch(0)
    ]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_worker_of_a_loader_gives_the_samples_of_its_steps_in_order(make, workers):
    stream = make(**RAW)
    steps = [batch["id"][batch["weight"] == 1].tolist() for batch in stream.epoch(0)]
    loader = DataLoader(SampleDataset(stream), batch_size=None, num_workers=workers)
    found = [sample["__id__"] for sample in loader]
    assert len(found) == 50
    for number in range(max(1, workers)):
        own = [id_ for step in steps[number :: max(1, workers)] for id_ in step]
        assert [id_ for id_ in found if id_ in own] == own


def test_samples_of_a_decoding_stream_are_refused(make):
    with pytest.raises(ConfigError, match="image=None"):
        SampleDataset(make())


def test_detections_leave_out_rows_of_weight_0():
    batch = {
        "image": np.arange(3, dtype=np.uint8).reshape(3, 1, 1, 1).repeat(3, axis=3),
        "weight": np.array([1, 0, 0.5], np.float32),
        "boxes": np.arange(24, dtype=np.float32).reshape(3, 2, 4),
        "boxes_class": np.array([[5, -1], [6, 7], [-1, -1]]),
    }
    images, targets = as_detections(batch)
    assert [round(255 * image[0, 0, 0].item()) for image in images] == [0, 2]
    assert [target["labels"].tolist() for target in targets] == [[5], []]
    assert [target["boxes"].tolist() for target in targets] == [[[0, 1, 2, 3]], []]


# --- without a DataLoader -------------------------------------------------------------------------


def test_a_tensor_stream_gives_the_streams_batches_epoch_after_epoch(make):
    loader = TensorStream(make())
    for epoch in range(2):
        found = list(loader)
        assert len(found) == len(loader) == 7
        assert all_same(found, make().epoch(epoch))
        assert all(tensor.is_pinned() == torch.cuda.is_available() for tensor in found[0].values())
    batches, again = iter(loader), TensorStream(make())
    next(batches)
    again.load_state_dict(loader.state_dict())
    assert all_same(batches, again)


def test_lists_stay_lists(make):
    batch = next(iter(TensorStream(make(**RAW), pin_memory=False)))
    assert (type(batch["key"]), type(batch["png"][0]), type(batch["id"])) == (
        list,
        bytes,
        torch.Tensor,
    )


# --- DataLoaders over epochs ----------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_a_chosen_epoch_reaches_all_workers(make, persistent):
    dataset = BatchDataset(make())
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    for epoch in (0, 1, 5, 5):
        dataset.set_epoch(epoch)
        assert all_same(loader, make().epoch(epoch))


@pytest.mark.slow
@pytest.mark.parametrize("chooses", [False, True])
def test_new_workers_that_would_read_an_epoch_again_warn(make, capfd, chooses):
    dataset = BatchDataset(make())
    # Spawned, so that they log as they do without pytest.
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for epoch in range(2):
        if chooses:
            dataset.set_epoch(epoch)
        list(loader)
    assert capfd.readouterr().err.count("new workers read epoch 0 again; call set_epoch") == (
        not chooses
    )


@pytest.mark.parametrize(("workers", "persist"), [(0, False), (2, True)])
def test_a_loaded_position_outranks_the_epoch_of_the_constructor(make, workers, persist):
    def loader_of(dataset):
        return StatefulDataLoader(
            dataset, batch_size=None, num_workers=workers, persistent_workers=persist
        )

    dataset = BatchDataset(make())
    loader, again = loader_of(dataset), loader_of(BatchDataset(make()))
    dataset.set_epoch(4)
    assert len(list(loader)) == 7
    again.load_state_dict(loader.state_dict())
    assert all_same(again, make().epoch(5))


def test_after_a_break_the_next_epoch_begins_and_a_state_saved_there_too(make):
    dataset, again = BatchDataset(make()), BatchDataset(make())
    for _ in dataset:
        break
    begun = iter(dataset)
    again.load_state_dict(dataset.state_dict())
    again.set_epoch(1)  # as frameworks do before each epoch; it is the epoch of the state
    expected = list(make().epoch(1))
    assert all_same(begun, expected)
    assert all_same(again, expected)


@pytest.mark.parametrize(
    ("options", "num_taken", "message"),
    [
        (
            {"batch_size": None, "num_workers": 2},
            1,
            "the state is of worker 0 of 1 of a DataLoader, and this is 0 of 2",
        ),
        ({}, 3, r"are \[4, 4\] here and were \[8, 8\] there; a state of samples"),
    ],
)
def test_a_state_that_would_repeat_or_skip_samples_is_refused(make, options, num_taken, message):
    dataset = SampleDataset(make(**RAW))
    samples = iter(dataset)
    for _ in range(num_taken):
        next(samples)
    again = SampleDataset(
        make(**RAW, **({} if options else {"global_batch_size": 4, "num_lanes": 4}))
    )
    with pytest.raises(ConfigError, match=message):
        load_and_begin(again, dataset.state_dict(), options)


def load_and_begin(dataset, state, options):
    dataset.load_state_dict(state)
    next(iter(DataLoader(dataset, **options)))


@pytest.mark.parametrize("rank", [0, 3])  # the last rank has nothing but pads in the last row
def test_samples_saved_after_the_last_one_go_on_with_the_next_epoch(make, rank):
    def dataset():
        return SampleDataset(make(rank=rank, world_size=4, **RAW))

    saved, again = dataset(), dataset()
    first = list(saved)
    again.load_state_dict(saved.state_dict())
    following = list(again)
    assert len(following) == pytest.approx(len(first), abs=1)
    assert following == list(saved)


def test_a_state_brings_its_order(make):
    dataset, again = BatchDataset(make(num_lanes=2, block_size=4, window=3)), BatchDataset(make())
    items = iter(dataset)
    next(items)
    again.load_state_dict(dataset.state_dict())
    assert all_same(again, list(items))
    with pytest.raises(ConfigError, match="block_size is 8 here and was 4 there"):
        BatchDataset(make(block_size=8)).load_state_dict(dataset.state_dict())


class OwnDataset(IterableDataset):
    """A dataset as one writes it: iterates over a stream, which is made before the workers or in
    each of them.
    """

    def __init__(self, make_stream, *, in_worker):
        self.make_stream, self.stream = make_stream, None if in_worker else make_stream()

    def __iter__(self):
        return iter(self.stream or self.make_stream())


@pytest.mark.slow
@pytest.mark.parametrize("in_worker", [False, True])
def test_workers_that_would_all_read_the_same_are_refused(shards, in_worker):
    dataset = OwnDataset(
        partial(Stream, shards, "train", batch_size=8, image_size=8), in_worker=in_worker
    )
    with pytest.raises(ConfigError, match=r"each of the 2 workers .* would read the same samples"):
        list(DataLoader(dataset, batch_size=None, num_workers=2))
    assert len(list(DataLoader(dataset, batch_size=None, num_workers=1))) == 7
