"""`fsdp`: one process for each device, each of which keeps its part of every weight, gradient and moment."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shardset.errors import ConfigError
from trainer.runtime.base import Step, map_tensors
from trainer.runtime.distributed import Ddp

UNSHARDABLE = ("DTensor", "sharding strategy", "placement", "fully_shard")
"""What torch's errors say where an operation of a model or an optimizer knows no sharded tensors."""


class Fsdp(Ddp):
    """PyTorch's FSDP2: weights are gathered block by block for a pass, and their gradients scattered again."""

    strategy = "fsdp"
    scales_gradients = False

    def module_to_device(self, module: nn.Module) -> nn.Module:
        if next(module.parameters(), None) is None:
            return super().module_to_device(module)
        with self._peer_errors(), _refusals():
            for block in blocks_of(module):
                self._shard_block(block)
            # Moves to the device what the blocks have left: never all weights at once.
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
        return module

    def accelerate(self, modules: Iterable[nn.Module], *, compile: bool | None, tf32: bool) -> None:
        # Sharded models compile only where the config says so: nobody has timed them.
        super().accelerate(modules, compile=bool(compile), tf32=tf32)

    def data_parallel(self, model: nn.Module) -> nn.Module:
        return model

    def shard_like(self, value: Any, weight: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or not isinstance(weight, DTensor) or value.shape != weight.shape:
            return value
        # Each process has the whole tensor, so none is sent: it keeps its part.
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)

    def to_host(self, tree: Any) -> Any:
        return super().to_host(map_tensors(tree if self.is_master else _sharded(tree), _local))

    def state_exchange(self) -> Callable[[str], list[str]] | None:
        if self.num_hosts == 1:
            return None
        # A group of its own: a collective of the training may be under way in another thread.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        return lambda text: self._exchange(text, group)

    def compiled(self, step: Step, name: str) -> Step:
        return _refusals()(super().compiled(step, name))

    def _shard_block(self, block: nn.Module) -> None:
        if self.precision == "bf16":
            # Gathered in half the bytes. Autocast rounds the same weights; those of norms stay in float32 there too.
            if vectors := vector_layers(block):
                fully_shard(vectors, mesh=self._mesh, reshard_after_forward=True)
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(block, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
        else:
            fully_shard(block, mesh=self._mesh, reshard_after_forward=True)

    def _exchange(self, text: str, group: dist.ProcessGroup | None) -> list[str]:
        own = np.frombuffer(text.encode(), dtype=np.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_hosts)]
        with self._peer_errors():
            dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
            padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
            padded[: len(own)] = torch.from_numpy(own.copy())
            rows = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(rows, padded, group=group)
        return [row[: int(size)].numpy().tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.num_hosts,))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model is a sequence of: the innermost modules of several layers that stand in a list."""
    counts = _counts(model)
    blocks = [
        child
        for module in model.modules()
        if isinstance(module, nn.Sequential | nn.ModuleList)
        for child in module.children()
        if _num_layers(child) > 1 and not isinstance(child, nn.ModuleList)
    ]
    outer = {id(module) for module in blocks for inner in blocks if inner is not module and inner in module.modules()}
    # A weight that is used outside as well belongs to the whole model.
    return [one for one in blocks if id(one) not in outer and _counts(one).items() <= counts.items()]


def vector_layers(block: nn.Module) -> list[nn.Module]:
    """The layers of which every own weight is a vector: norms and scales."""
    own = {module: list(module.parameters(recurse=False)) for module in block.modules()}
    return [module for module, weights in own.items() if weights and all(weight.dim() == 1 for weight in weights)]


def _num_layers(module: nn.Module) -> int:
    return sum(next(one.parameters(recurse=False), None) is not None for one in module.modules())


def _counts(module: nn.Module) -> Counter[int]:
    """How often each weight is used in the module."""
    return Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded(tree: Any) -> Any:
    """Nested dicts with the sharded tensors only."""
    if isinstance(tree, dict):
        kept = {name: _sharded(value) for name, value in tree.items()}
        return {name: value for name, value in kept.items() if value is not None}
    return tree if isinstance(tree, DTensor) else None


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns torch's errors about what can't be sharded into ConfigError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if not any(word in reason for word in UNSHARDABLE):
            raise
        raise ConfigError(
            f"strategy fsdp: an operation of this model or optimizer can't be sharded ({reason}); use --strategy ddp, "
            "or another --model or optimizer.name"
        ) from error
