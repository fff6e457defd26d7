"""States of any shape and value: taken, or refused by one sentence."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardset.adapters.grain import StreamIterDataset
from shardset.adapters.torch import BatchDataset
from shardset.errors import ConfigError
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.makers.shardset import png_samples, write_shard_set

NUMBERS = st.one_of(
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.integers(-3, 20),
    st.integers(0, 2**31 - 1).map(np.int32),
    st.integers(0, 2**63 - 1).map(np.int64),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.integers(0, 100).map(torch.tensor),
    st.floats().map(np.float64),
)
LEAVES = st.one_of(
    NUMBERS, st.none(), st.booleans(), st.floats(), st.text(), st.binary(), st.just(np.arange(3)), st.just(object())
)
VALUES = st.recursive(
    LEAVES, lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text() | st.integers(), own, max_size=3)
)


def nested(depth):
    values = []
    for _ in range(depth):
        values = [values]
    return values


@pytest.fixture(scope="module")
def makers(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("set"))
    write_shard_set(open_storage(url), {"train": png_samples("train", 20, size=8)}, num_shards=2)

    def stream():
        return Stream(url, "train", batch_size=4, image=None)

    return [
        (lambda: stream(), lambda made, state: (made.load_state_dict(state), made.state_dict())),
        (lambda: BatchDataset(stream()), lambda made, state: (made.load_state_dict(state), made.state_dict())),
        (lambda: iter(StreamIterDataset(stream())), lambda made, state: (made.set_state(state), made.get_state())),
    ]


def states_of(makers):
    return [
        made.get_state() if hasattr(made, "get_state") else made.state_dict() for made in (make() for make, _ in makers)
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_state_is_taken_or_refused_by_a_sentence(makers, data):
    number = data.draw(st.integers(0, 2))
    make, load = makers[number]
    state = states_of(makers)[number]
    target = state["stream"] if "stream" in state and data.draw(st.booleans()) else state
    target[data.draw(st.sampled_from(list(target)))] = data.draw(VALUES | st.sampled_from([nested(20), nested(3_000)]))
    whole = data.draw(st.sampled_from([state, state, state, [state], "state", None]) | VALUES)
    with suppress(ConfigError):  # anything else is a foreign exception
        load(make(), whole)


def test_numbers_of_other_libraries_are_taken(makers):
    for (make, load), state in zip(makers, states_of(makers), strict=True):
        own = state.get("stream", state)
        own.update(epoch=np.int64(3), row=torch.tensor(4))
        assert load(make(), state)[1].get("stream", load(make(), state)[1])["epoch"] == 3
