"""Optimizers as devices need them: their options, and a step at a rate."""

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from trainer.config import Precision


def options_for(name: str, device: torch.device, precision: Precision) -> dict[str, Any]:
    """The options of an optimizer that suit a device: one kernel for all weights, or a step count
    on the device, whose powers are float32.
    """
    # a fused SGD whose first step is skipped continues with momentum that nobody has set
    if precision == "fp16":
        return {}
    if device.type == "cuda" and name in ("sgd", "momentum", "adam", "adamw"):
        return {"fused": True}
    # With a step count on the host these read a number of the device back in each step, or it
    # becomes a constant of a compiled graph.
    names = ("adam", "adamw", "nadam") if device.type == "tpu" else ("nadam",)
    return {"capturable": True} if device.type != "cpu" and name in names else {}


def step(optimizer: torch.optim.Optimizer, rate: float, scaler: GradScaler) -> None:
    """One step at that rate, and no gradients left.

    A group's `lr_scale`, if it has one, multiplies its rate.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
