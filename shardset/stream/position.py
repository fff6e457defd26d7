"""Where an iteration over a stream stands, and the plain values that a checkpoint keeps of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shardset.order.state import OrderState, state_from_values


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Batches of `epoch` were given up to `step`; `begun` if the iteration that gave them has been started."""

    epoch: int = 0
    step: int = 0
    begun: bool = False

    @property
    def next_start(self) -> "StreamPosition":
        """Where the next iteration begins: here, or at the next epoch if this one has been begun."""
        return StreamPosition(self.epoch + 1, 0, True) if self.begun else StreamPosition(self.epoch, self.step, True)


def values_of_state(state: OrderState) -> dict[str, Any]:
    """A state as numbers and strings by name, which any checkpoint format takes."""
    values: dict[str, Any] = msgspec.json.decode(state.to_json())
    return values


def state_of_values(values: Mapping[str, Any]) -> OrderState:
    """The state from `values_of_state`; numbers may be those of NumPy or a tensor. Raises ConfigError for others."""
    return state_from_values(values, OrderState)
