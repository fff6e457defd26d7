"""The situations of torchdata's own tests of iterable datasets, each against a loader that nothing
interrupts.
"""

import copy
import json
from itertools import islice

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from shardset.adapters.torch import BatchDataset, SampleDataset
from tests.shardset.adapters.conftest import RAW

LOADERS = {
    "alone": {},
    "new": {"num_workers": 2},
    "stay": {"num_workers": 2, "persistent_workers": True},
}
KINDS = {"batches": None, "samples": None, "sevens": 7}  # what the dataset gives: batch_size
ALL = [("batches", "stay"), ("samples", "alone"), ("sevens", "new")]
KNOWN = {}


@pytest.fixture
def loader_of(make):
    """Makes a loader over a new dataset, and loads a state, by way of JSON."""

    def loader_of(kind, name, state=None, **more):
        dataset = BatchDataset(make()) if kind == "batches" else SampleDataset(make(**RAW))
        loader = StatefulDataLoader(
            dataset, batch_size=KINDS[kind], collate_fn=ids_of, **LOADERS[name], **more
        )
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        return loader

    return loader_of


def ids_of(item):
    if isinstance(item, list):
        return [each["__id__"] for each in item]
    return item["id"].tolist() if "id" in item else item["__id__"]


def whole(loader_of, kind, name):
    """The items of the first four epochs, from a loader that nothing interrupts."""
    if (kind, name) not in KNOWN:
        loader = loader_of(kind, name)
        KNOWN[kind, name] = [epoch_of(loader, epoch) for epoch in range(4)]
        in_stream = [
            [batch["id"].tolist() for batch in loader.dataset.stream.epoch(epoch)]
            for epoch in range(4)
        ]
        assert kind != "batches" or KNOWN[kind, name] == in_stream
    return KNOWN[kind, name]


def epoch_of(loader, epoch):
    """The items of an epoch; workers that start anew are told which."""
    if loader.num_workers and not loader.persistent_workers:
        loader.dataset.set_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize(("kind", "name"), ALL)
@pytest.mark.parametrize("part", ["some", "all"])
def test_interrupted_within_an_epoch_gives_the_rest_and_then_whole_epochs(
    loader_of, kind, name, part
):
    epochs = whole(loader_of, kind, name)
    num_taken = 3 if part == "some" else len(epochs[0])
    loader = loader_of(kind, name)
    items = iter(loader)
    assert list(islice(items, num_taken)) == epochs[0][:num_taken]
    resumed = loader_of(kind, name, loader.state_dict())
    assert list(items) == epochs[0][num_taken:]
    assert [list(resumed), epoch_of(resumed, 1), epoch_of(resumed, 2)] == [
        epochs[0][num_taken:],
        *epochs[1:3],
    ]


@pytest.mark.parametrize(("every", "ahead", "num_taken"), [(2, 2, 1), (17, 5, 19)])
def test_rare_snapshots_and_items_fetched_ahead_are_not_lost(loader_of, num_taken, every, ahead):
    more = {"snapshot_every_n_steps": every, "prefetch_factor": ahead}
    epochs, loader = whole(loader_of, "samples", "stay"), loader_of("samples", "stay", **more)
    list(islice(iter(loader), num_taken))
    resumed = loader_of("samples", "stay", loader.state_dict(), **more)
    assert [list(resumed), list(resumed)] == [epochs[0][num_taken:], epochs[1]]
    loader.load_state_dict(loader.state_dict())
    list(islice(iter(loader), 1))  # fewer than there are workers
    assert (
        list(loader_of("samples", "stay", loader.state_dict(), **more))
        == epochs[0][num_taken + 1 :]
    )


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_saved_after_epochs_goes_on_with_the_next_in_a_loader_that_has_begun(loader_of, kind, name):
    num_before = 1 if kind == "sevens" else 2
    epochs, loader, begun = (
        whole(loader_of, kind, name),
        loader_of(kind, name),
        loader_of(kind, name),
    )
    assert [epoch_of(loader, epoch) for epoch in range(num_before)] == epochs[:num_before]
    list(islice(iter(begun), 2))
    begun.load_state_dict(loader.state_dict())
    assert list(begun) == epochs[num_before]
    assert epoch_of(begun, num_before + 1) == epochs[num_before + 1]


@pytest.mark.parametrize(("name", "begins"), [("alone", False), ("stay", True)])
def test_saved_before_the_first_item_begins_anew_in_the_same_loader(loader_of, name, begins):
    epochs, loader = whole(loader_of, "sevens", name), loader_of("sevens", name)
    items = iter(loader) if begins else loader
    state = loader.state_dict()
    assert list(items) == epochs[0]
    list(islice(iter(loader), 2))
    for _ in range(2):  # the same state, loaded twice
        loader.load_state_dict(state)
        assert [list(loader), list(loader)] == epochs[:2]


@pytest.mark.parametrize(("kind", "name"), [("batches", "alone"), ("samples", "stay")])
def test_a_state_from_a_loop_that_is_left_stays_the_same_when_handed_on(loader_of, kind, name):
    epochs, loader = whole(loader_of, kind, name), loader_of(kind, name)
    for _ in loader:
        states = [loader.state_dict()]
        break
    states.append(loader.state_dict())
    kept = copy.deepcopy(states)
    assert list(loader) == epochs[1]
    assert states == kept
    for state in states:
        handed_on = loader_of(kind, name, state)
        assert handed_on.state_dict() == state
        iter(handed_on)
        again = loader_of(kind, name, handed_on.state_dict())
        assert [list(again), list(again)] == [epochs[0][1:], epochs[1]]
