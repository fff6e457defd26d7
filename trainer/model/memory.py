"""The memory that a training step needs, from shapes alone: nothing is computed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardset.errors import ConfigError
from trainer.config import OptimizerConfig, TrainConfig
from trainer.model import build
from trainer.runtime.fsdp import blocks_of
from trainer.runtime.machine import Machine

MIB, GIB = 1 << 20, 1 << 30
WORKSPACE = 4
"""Tensors as large as the largest activation that a pass holds besides: results and gradients of a layer, each also in
the layout of the library that computes it."""
LIBRARIES = 64 << 20
"""What the libraries that compute keep for themselves."""
GATHERED = 3
"""Copies of the largest block that `fsdp` holds at once: its weights, those of the next block, and its gradients."""
UPDATE = 2
"""Copies of all weights that an optimizer's update holds for a moment."""

SURE = 1.15
"""An estimate that exceeds the memory by this factor is an error; less is a warning: the estimate may be wrong."""
NEARLY = 0.85
SHARE = 0.5
"""Of all memory that a run without a recipe takes for a step; streams, other programs and errors have the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of a device for one training step. `evaluation` is what an evaluation holds beside the weights.

    `gathered` is what `fsdp` holds of weights and gradients for a moment, besides the parts that it keeps.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    largest: int
    batch: int
    evaluation: int
    gathered: int = 0

    @property
    def total(self) -> int:
        """The peak: at the end of the forward pass, in the optimizer's update, or in an evaluation."""
        moving = (
            self.gathered + self.activations + self.gradients + WORKSPACE * self.largest,
            self.gradients + UPDATE * self.gradients,
            self.gathered + self.evaluation,
        )
        return LIBRARIES + self.weights + self.optimizer + self.average + self.batch + max(moving)

    def __str__(self) -> str:
        fixed = self.weights + self.gradients + self.optimizer + self.average
        return (
            f"{_size(self.total)} ({_size(self.activations)} of activations, {_size(fixed)} of weights and optimizer)"
        )


def need_of(config: TrainConfig, num_classes: int, num_processes: int) -> MemoryNeed | None:
    """What a step of this run needs in each of its processes; None if shapes alone do not tell.

    Raises ConfigError where the model can't be built.
    """
    net = build.build(replace(config.model, pretrained=None), num_classes, config.seed)
    build.freeze(net, config.model)
    build.checkpoint_activations(net, config.model)
    device_batch = -(-config.global_batch_size // num_processes)
    pass_batch = max(2, -(-device_batch // config.accumulate))  # BatchNorm refuses a single value
    shapes = net.to("meta")
    pixels = config.image.size**2 * 3
    num_parts = num_processes if config.strategy == "fsdp" else 1
    weights = -(-_num_bytes(shapes.parameters()) // num_parts) + _num_bytes(shapes.buffers())
    gradients = -(-_num_bytes(one for one in shapes.parameters() if one.requires_grad) // num_parts)
    growth = (config.image.size_in_evaluation / config.image.size) ** 2
    try:
        saved = _saved_bytes(shapes, config, pass_batch)
        again = _recomputed_bytes(shapes, config, pass_batch) if config.model.checkpoint_activations else 0
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError):
        # A model of yours that reads numbers, or one that takes no images of this size: `check_size` says so.
        return None
    largest = max(saved, default=0)
    return MemoryNeed(
        weights=weights,
        gradients=gradients,
        optimizer=round(gradients * _moments_per_weight(config.optimizer)),
        average=weights if config.regularize.ema_decay else 0,
        activations=sum(saved) + again,
        largest=largest,
        # uint8 batches that wait on the device, and the float one of a pass, mirrored.
        batch=3 * device_batch * pixels + 2 * 4 * pass_batch * pixels,
        evaluation=round(growth * (WORKSPACE * largest * config.accumulate + 4 * device_batch * pixels)),
        gathered=GATHERED * _largest_block(shapes) if num_parts > 1 else 0,
    )


def is_own(config: TrainConfig) -> bool:
    """Whether the model is the user's function: a run calls it for its steps only, since it may count its calls."""
    return ":" in config.model.name and not config.model.name.startswith("trainer.")


def num_passes(config: TrainConfig, num_classes: int, machine: Machine) -> int:
    """The fewest passes, a power of 2, with which a step takes at most `SHARE` of the memory of a device."""
    if not machine.memory_bytes or is_own(config):
        return config.accumulate
    most = config.global_batch_size // machine.num_processes
    passes = config.accumulate
    while 2 * passes <= most and most % (2 * passes) == 0:
        need = need_of(replace(config, accumulate=passes), num_classes, machine.num_processes)
        if need is None or need.total <= SHARE * machine.memory_bytes:
            break
        passes *= 2
    return passes


def check(need: MemoryNeed, config: TrainConfig, free: int | None, *, besides: int, is_sure: bool) -> str | None:
    """A warning where a step may not fit into the free memory; raises ConfigError where it surely does not.

    `besides` is what else the run takes from the same memory. Without a known amount there is nothing to compare.
    """
    if free is None or need.total + besides <= NEARLY * free:
        return None
    streams = f" and its streams {_size(besides)}" if besides else ""
    hint = advice(config, (need.total + besides) / max(1, NEARLY * free))
    text = f"a step needs about {need}{streams}, and {_size(free)} are free: {hint}"
    if is_sure and need.total + besides > SURE * free:
        raise ConfigError(text)
    return f"memory may run out: {text}"


def advice(config: TrainConfig, excess: float = 2.0) -> str:
    """The flags that make a step smaller, by the factor `excess`."""
    times = 2 ** max(1, math.ceil(math.log2(excess)))
    passes = f"--set accumulate={times * config.accumulate} (the same batches in more passes), "
    return f"{passes}--batch-size, --image-size or --model make it smaller"


def _largest_block(shapes: nn.Module) -> int:
    """The weights that are gathered at once: those of a block, or all that are in none."""
    blocks = [_num_bytes(block.parameters()) for block in blocks_of(shapes)]
    return max([*blocks, _num_bytes(shapes.parameters()) - sum(blocks)])


def _saved_bytes(shapes: nn.Module, config: TrainConfig, batch: int) -> list[int]:
    """The size of each tensor that the backward pass needs, without weights."""
    saved: list[int] = []
    _run_forward(shapes, config, batch, saved.append)
    return saved


def _recomputed_bytes(shapes: nn.Module, config: TrainConfig, batch: int) -> int:
    """The most that the backward pass holds of one part of the model that it computes again."""
    kept = _bytes_by_module(shapes, config, batch)
    net: Any = shapes
    net.set_grad_checkpointing(False)
    whole = _bytes_by_module(shapes, config, batch)
    return max((whole.get(name, 0) for name, num_bytes in kept.items() if not num_bytes), default=0)


def _bytes_by_module(shapes: nn.Module, config: TrainConfig, batch: int) -> dict[str, int]:
    """What the backward pass keeps of each module, with the modules inside it."""
    saved: list[int] = []
    starts: dict[str, int] = {}
    found: dict[str, int] = {}
    hooks = []
    for name, module in shapes.named_modules():
        begin = partial(lambda name, *_: starts.update({name: len(saved)}), name)
        end = partial(lambda name, *_: found.update({name: sum(saved[starts[name] :])}), name)
        hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    _run_forward(shapes, config, batch, saved.append)
    for hook in hooks:
        hook.remove()
    return found


def _run_forward(shapes: nn.Module, config: TrainConfig, batch: int, keep_size: Callable[[int], None]) -> None:
    """A training pass over shapes, which tells the size of each tensor that is kept for the backward pass, once."""
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    shapes = shapes.to(dtype)
    build.set_training(shapes, config.model)
    fixed = {_storage(tensor) for tensor in (*shapes.parameters(), *shapes.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in fixed and _storage(tensor) not in saved:
            # Kept alive: else another one could get its number.
            saved[_storage(tensor)] = tensor.untyped_storage()
            keep_size(tensor.untyped_storage().nbytes())
        return tensor

    images = torch.empty(batch, 3, config.image.size, config.image.size, device="meta", dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        shapes(images).float().log_softmax(-1)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _moments_per_weight(config: OptimizerConfig) -> float:
    """Numbers that an optimizer keeps for each weight."""
    net = nn.Linear(64, 64)
    optimizer = build.optimizer(replace(config, head_learning_rate=None, layer_decay=None), net)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = optimizer.state_dict()["state"].values()
    numbers = sum(value.numel() for state in states for value in state.values() if isinstance(value, torch.Tensor))
    return float(numbers) / sum(parameter.numel() for parameter in net.parameters())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
