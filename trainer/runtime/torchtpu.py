"""A TPU with TorchTPU, the device type `tpu` of PyTorch: what its devices and processes need in
addition to torch.distributed.

`import torch` loads its package, torch_tpu, by itself where that is installed and the machine has a
TPU. So nothing here imports it.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from shardset.errors import ConfigError
from trainer.runtime.base import Single, Step

DEVICE_TYPE = "tpu"
BACKEND = "cpu:gloo,tpu:tpu_dist"
"""The back ends of torch.distributed: hosts agree on numbers of 64 bits, which a TPU does not
compute with.
"""

TOPOLOGY = "TORCH_TPU_TOPOLOGY"
ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
"""Environment variables that a launcher sets: how the chips are wired, and where each process finds
the others.
"""


def is_available() -> bool:
    """Whether torch has loaded TorchTPU and found a TPU."""
    # Not torch.tpu.is_available, which TorchTPU refuses to callers outside torch.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == DEVICE_TYPE


def check_machine() -> None:
    """Raises ConfigError where TorchTPU is loaded without a TPU: there, the first backward pass
    would wait for one.
    """
    if "torch_tpu" in sys.modules and not is_available():
        raise ConfigError(
            "TorchTPU is loaded, but this machine has no TPU that it can use; to train on other"
            " devices, set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or use an environment without torch_tpu"
        )


def is_launched() -> bool:
    """Whether this is one of the processes that TorchTPU's launch environment was made for."""
    return TOPOLOGY in os.environ and "RANK" in os.environ


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises ConfigError without the variables of the launcher, without which TorchTPU aborts in
    native code.
    """
    if missing := [name for name in (ADDRESSES, TOPOLOGY) if name not in environment]:
        raise ConfigError(
            f"TorchTPU: {' and '.join(missing)} not set, which every process of a TPU needs; start"
            " the run with `python -m trainer.tpu.processes ...`, which takes the flags of"
            " `shardset train`"
        )


def set_launch_environment() -> None:
    """Sets the variables that the processes of this machine need; starts no TPU. Raises ConfigError
    without a TPU.
    """
    try:
        module().distributed.set_tpu_launch_env()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"TorchTPU can't tell how the chips of this machine are wired: {error}"
        ) from error


def num_local_processes(environment: Mapping[str, str]) -> int:
    """The processes of this machine in a launch environment, which has an address for each one of
    all machines.
    """
    return len(environment[ADDRESSES].split(",")) // int(environment.get("NNODES", "1"))


def spmd_safe(step: Step) -> Step:
    """The step, marked as one that all processes run alike, if this version of TorchTPU knows such
    a mark.
    """
    mark: Any = getattr(module().distributed, "spmd_safe", None)
    return step if mark is None else mark(step)


def module() -> Any:
    """`torch.tpu` of TorchTPU. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("torch.tpu")
    except ImportError as error:
        raise ConfigError(
            f"TorchTPU is not installed ({error}); run pip install 'shardset[trainer,torchtpu]' in"
            " a separate environment"
        ) from error


class TorchTpu(Single):
    """One process with one TPU chip."""

    is_cloud, steps_block = True, False
    compiles_models, compile_backend = True, "tpu"
    scales_gradients = False
    capturable = ("adam", "adamw", "nadam")  # or the count is a constant of a compiled graph

    def _find_device(self) -> torch.device:
        return torch.device(DEVICE_TYPE)

    def accelerate(self, modules: Iterable[nn.Module], *, compile: bool | None, tf32: bool) -> None:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        super().accelerate(modules, compile=compile, tf32=tf32)

    def number(self, value: float) -> torch.Tensor:
        # a Python number would be part of a compiled graph
        return torch.tensor(value, device=self.device)

    @torch.no_grad()
    def update(
        self, optimizer: torch.optim.Optimizer, rate: float | torch.Tensor, scaler: GradScaler
    ) -> None:
        """Optimizers accept no tensor.

        Steps are proportional to the rate in all but LARS with `trust_clip`, so a step at rate 1 is
        taken and then only `rate` of the way.
        """
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        before = [weight.clone() for weight in weights]
        super().update(optimizer, 1.0, scaler)
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old + rate * (weight - old))
