"""What a state file of a checkpoint holds: plain tensors and numbers that `torch.load(weights_only=True)` reads."""

import io
import pickle
import struct
import textwrap
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import torch

from shardset.errors import ConfigError
from shardset.order.permutation import ORDER_VERSION
from shardset.order.state import state_from_json
from trainer.errors import CheckpointError

Count = Annotated[int, msgspec.Meta(ge=0)]


class LearnerState(TypedDict):
    """Weights, averaged weights and the optimizer's moments: what a learner needs to go on, on any strategy.

    Moments are numbered; `optimizer_weights` says which weight each belongs to. Fields that are not required are not in
    the states of older versions.
    """

    model: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor] | None
    optimizer: dict[Count, dict[str, Any]]
    optimizer_weights: NotRequired[list[str]]
    optimizer_counters: NotRequired[dict[str, Any]]


class CheckpointState(LearnerState):
    """What a state file holds: the learner, and how far its run is. `seen` is a SampleDigest, of the epoch so far."""

    format: NotRequired[int]
    version: NotRequired[str]
    identity: dict[str, Any]
    config: dict[str, Any]
    step: Count
    epoch: Count
    step_in_epoch: NotRequired[Count]
    closed_epochs: Count
    seen: Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)]
    epoch_totals: NotRequired[Annotated[list[float], msgspec.Meta(min_length=4, max_length=4)]]
    best_top1: float | None
    best_epoch: Count | None
    last_top1: float | None
    seconds: float
    seconds_to_target: float | None
    stream: str | None


_DAMAGED = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError,
    ValueError, pickle.UnpicklingError, struct.error,
)  # fmt: skip
"""What torch.load raises for damaged bytes. Its unpickler takes each instruction as if the ones before it were right,
so a wrong one shows wherever it is used: a stack or memo without that place, a tuple where a dict should be, a number
that fits no size. With `weights_only` it runs no code of a file, so none of these comes from elsewhere."""


class _Regularize(msgspec.Struct):
    ema_decay: float | None


class _Config(msgspec.Struct):
    regularize: _Regularize


class _WithConfig(msgspec.Struct):
    """The part of a state's config that is read again."""

    config: _Config


class _Versioned(msgspec.Struct):
    version: int


def encode(state: LearnerState) -> bytes:
    """The bytes of a state file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def decode(data: bytes, where: str) -> CheckpointState:
    """The state in those bytes, on the CPU; raises CheckpointError unless they are plain tensors and numbers."""
    try:
        state: CheckpointState = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except _DAMAGED as error:
        raise _not_a_checkpoint(where, error) from error
    return state


def checked(state: CheckpointState, where: str) -> CheckpointState:
    """The state; raises CheckpointError unless it is one to go on from: each field there, and of its type."""
    try:
        _check_stream(msgspec.convert(state, CheckpointState)["stream"])
        msgspec.convert(state, _WithConfig)
    except (msgspec.MsgspecError, UnicodeError, ConfigError) as error:
        raise _not_a_checkpoint(where, error) from error
    return state


def _check_stream(state: str | None) -> None:
    # One of a newer version is no damage: the stream refuses it, and the checkpoint stays.
    if state is not None and msgspec.json.decode(state, type=_Versioned).version <= ORDER_VERSION:
        state_from_json(state)


def _not_a_checkpoint(where: str, error: Exception) -> CheckpointError:
    reason = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")
    return CheckpointError(f"{where}: not a checkpoint ({reason}); resume from another one")
