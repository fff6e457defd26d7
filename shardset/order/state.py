"""The state of an order: what a run saves so that it can resume at the same row."""

import operator
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from shardset.errors import ConfigError
from shardset.prepared import JSON_ERRORS, prepared

StateCount = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
"""A number in a state that is computed with; no run gets further."""

StateT = TypeVar("StateT")


@prepared
class OrderState(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """All that a run needs to resume at a row: the same on every replica, about 300 bytes of JSON.

    `view` is the digest of the view that it reads, "" for a whole set.
    """

    version: int
    manifest: str
    view: str = ""
    seed: int | None
    epoch: StateCount
    row: StateCount
    num_lanes: StateCount = msgspec.field(name="L")
    block_size: StateCount = msgspec.field(name="q")
    window: StateCount = msgspec.field(name="w")


ORDER_NAMES = ("num_lanes", "block_size", "window")
"""The numbers of an order that follow from the first run and stand in a state: L, q and w."""

States = OrderState | list[OrderState]
"""The state of a stream, or of each set of a mixture."""


def states_from_json(text: str | bytes) -> States:
    """A state, or the states of a mixture, from JSON; raises ConfigError for
    anything else.
    """
    return _decode(text, States)  # type: ignore[arg-type]


def values_of_state(state: OrderState) -> dict[str, Any]:
    """A state as numbers and strings by name, which any checkpoint format takes."""
    values: dict[str, Any] = msgspec.to_builtins(state, enc_hook=operator.index)
    return values


def state_from_values(values: Mapping[str, Any] | OrderState, kind: type[StateT]) -> StateT:
    """A state from plain values, whose numbers may come from NumPy or a tensor, or from a state
    that was read; raises ConfigError for others.
    """
    try:
        plain = values if isinstance(values, OrderState) else dict(values)
        text = msgspec.json.encode(plain, enc_hook=operator.index)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"the state holds what no state does ({error}); resume from another checkpoint"
        ) from error
    return _decode(text, kind)


def _decode(text: str | bytes, kind: type[StateT]) -> StateT:
    try:
        return msgspec.json.decode(text, type=kind)
    except JSON_ERRORS as error:
        raise ConfigError(
            f"the order state can't be read ({error}); resume from another checkpoint"
        ) from error


_CHOSEN = " (by default it follows from the batch, the processes and budget_bytes)"
_CAUSES = {
    "version": "",
    "manifest": (
        " (the set has changed: SET@N opens an older version, `shardset log SET` lists them)"
    ),
    "view": " ('' is the whole set)",
    "seed": "",
    "num_lanes": _CHOSEN,
    "block_size": _CHOSEN,
    "window": _CHOSEN,
}
"""The values that two orders of one version share, and why they may differ."""


def check_same_order(here: OrderState, saved: OrderState) -> None:
    """Raises ConfigError with the first difference between the order of this run and the order of a
    saved state.
    """
    for name, cause in _CAUSES.items():
        value, saved_value = getattr(here, name), getattr(saved, name)
        if value != saved_value:
            raise ConfigError(
                f"this run can't resume from that state: {name} is {value!r} here and was"
                f" {saved_value!r} there{cause}; use the same, or start a new run"
            )
