"""The contents of a checkpoint's state file: plain tensors and numbers that `torch.load(weights_only=True)` reads."""

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
from shardset.prepared import prepared
from trainer.errors import CheckpointError

Count = Annotated[int, msgspec.Meta(ge=0)]


class LearnerState(TypedDict):
    """Weights, averaged weights and optimizer state, which a learner of any strategy can resume from.

    The keys of `optimizer` are positions in `optimizer_weights`, the names of the weights. States of older versions
    lack the fields that are not required.
    """

    model: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor] | None
    optimizer: dict[Count, dict[str, Any]]
    optimizer_weights: NotRequired[list[str]]
    optimizer_counters: NotRequired[dict[str, Any]]
    scaler: NotRequired[dict[str, float]]


@prepared
class CheckpointState(LearnerState):
    """The state of a learner and the position of its run. `seen` is the SampleDigest of the epoch so far."""

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
"""What torch.load raises for damaged bytes. Its unpickler trusts every instruction, so a wrong one fails wherever its
result is used. With `weights_only` it runs no code of the file, so none of these errors comes from elsewhere."""


class _Regularize(msgspec.Struct):
    ema_decay: float | None


class _Config(msgspec.Struct):
    regularize: _Regularize


@prepared
class _WithConfig(msgspec.Struct):
    """The part of the recorded config that `evaluate` needs."""

    config: _Config


@prepared
class _Versioned(msgspec.Struct):
    version: int


def encode(state: LearnerState) -> bytes:
    """The bytes of a state file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def decode(data: bytes, where: str) -> CheckpointState:
    """The state in those bytes, on the CPU. Raises CheckpointError unless it has every field, each of its type."""
    try:
        state: CheckpointState = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        _check_stream(msgspec.convert(state, CheckpointState)["stream"])
        msgspec.convert(state, _WithConfig)
    except (*_DAMAGED, msgspec.MsgspecError, ConfigError) as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")
        raise CheckpointError(f"{where}: not a checkpoint ({reason}); resume from another one") from error
    return state


def _check_stream(state: str | None) -> None:
    # The stream refuses a newer version itself. It is no damage: the checkpoint must not be skipped.
    if state is not None and msgspec.json.decode(state, type=_Versioned).version <= ORDER_VERSION:
        state_from_json(state)
