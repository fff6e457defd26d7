"""The state as JSON."""

import json

import pytest

from shardset.errors import ConfigError
from shardset.order.state import OrderState, states_from_json, values_of_state


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"version": 1}', "x" * 5000, b"\xff", '{"version": "1"}']
)
def test_what_is_no_state_is_refused(text):
    with pytest.raises(ConfigError, match="order state"):
        states_from_json(text)


def test_state_spells_its_fields_as_documented():
    state = OrderState(
        version=1,
        manifest="m",
        seed=3,
        epoch=2,
        row=8,
        num_lanes=4,
        block_size=3,
        window=5,
    )
    assert json.dumps(values_of_state(state)) == (
        '{"version": 1, "manifest": "m", "seed": 3, "epoch": 2, "row": 8, "L": 4, "q": 3, "w": 5}'
    )
