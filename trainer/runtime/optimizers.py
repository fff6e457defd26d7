"""Optimizers as devices need them: options, the state before the first step, and a step at a rate
on the device.
"""

import math
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

from shardset.errors import ConfigError
from trainer.config import Precision

STATIC_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lars")
"""Optimizers that compile to one graph: their state exists from the start and holds no Python
number.
"""

Moments = dict[int, dict[str, torch.Tensor]]
"""The state of an optimizer by the number of the weight."""


def options_for(name: str, device: torch.device, precision: Precision) -> dict[str, Any]:
    """The options of an optimizer that suit a device: one kernel for all weights, or a step count
    on the device.
    """
    # a fused SGD whose first step is skipped continues with momentum that nobody has set
    if precision == "fp16":
        return {}
    if device.type == "cuda" and name in ("sgd", "momentum", "adam", "adamw"):
        return {"fused": True}
    # With a step count on the host, Adam's bias correction is a constant of the compiled graph.
    return (
        {"capturable": True} if device.type != "cpu" and name in ("adam", "adamw", "nadam") else {}
    )


def zero_moments(optimizer: torch.optim.Optimizer, name: str) -> Moments:
    """The state before the first step, so that this step compiles to the same graph as all others.

    `optimizer` is on the CPU, and only for this. Raises ConfigError unless it is one of
    STATIC_OPTIMIZERS.
    """
    if name not in STATIC_OPTIMIZERS:
        known = ", ".join(STATIC_OPTIMIZERS)
        raise ConfigError(
            f"optimizer {name!r} does not compile to one graph on XLA; use one of {known}, or"
            " strategy ddp or single"
        )
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # a step at rate 0 without gradients moves no weight
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    moments: Moments = optimizer.state_dict()["state"]
    return {
        number: {key: torch.zeros_like(value) for key, value in own.items()}
        for number, own in moments.items()
    }


def step(optimizer: torch.optim.Optimizer, rate: float, scaler: GradScaler) -> None:
    """One step at that rate, and no gradients left.

    A group's `lr_scale`, if it has one, multiplies its rate.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def step_by_tensor(optimizer: torch.optim.Optimizer, rate: torch.Tensor) -> None:
    """The same at a rate on the device.

    A rate that is a number would be part of a compiled graph, and optimizers take no tensor. Their
    steps are proportional to the rate, so a step at rate 1 is taken and then only `rate` of the
    way.
    """
    scales = [
        (weight, group.get("lr_scale", 1.0))
        for group in optimizer.param_groups
        for weight in group["params"]
    ]
    before = [weight.clone() for weight, _ in scales]
    for group in optimizer.param_groups:
        group["lr"] = 1.0
        if "betas" in group:
            group["betas"] = tuple(map(ExactBeta, group["betas"]))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for (weight, scale), old in zip(scales, before, strict=True):
        weight.copy_(old + rate * scale * (weight - old))


class ExactBeta(float):
    """A beta of Adam. `1 - beta**step` has all its digits, for a step that is a float32 tensor.

    As floats, 1 - 0.999 is wrong by 1.3e-5 of it, and so would be every weight's way in the first
    steps.
    """

    def __pow__(self, step: Any, modulo: None = None) -> Any:
        return _Power(step * (math.log(self) if self else -math.inf))


class _Power(NamedTuple):
    """e**exponent, of which only what is left to 1 is asked for."""

    exponent: torch.Tensor

    def __rsub__(self, one: int) -> torch.Tensor:
        return -torch.expm1(self.exponent)
