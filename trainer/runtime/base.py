"""Devices and processes as the training loop sees them: the protocol of all runtimes.

A runtime knows where tensors live, which part of the data this process reads, and how processes
agree. The training loop knows none of that. What a method does here suits one process on a CPU, in
plain PyTorch. Each kind of device and of group has a subclass in a module of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from shardset.errors import ConfigError
from trainer.config import Precision
from trainer.runtime.heartbeat import Address, HeartbeatClient
from trainer.runtime.machine import compile_obstacle

TensorBatch = dict[str, torch.Tensor]
"""`image`, `label` and `weight`, and where used `flip` and `mix`.

The first dimension is the sample.
"""

Step = Callable[..., torch.Tensor]


class Runtime:
    """One process of a run.

    This process reads part `host` of `num_hosts` of the data. Gradients are averaged over
    `num_replicas`.
    """

    strategy: str
    compile_backend = "inductor"
    compiles_models = False
    """Whether models are compiled by torch.compile where the config leaves it open."""
    compiler: tuple[str, tuple[str, ...]] = "CXX", ("g++", "clang++")
    """What torch.compile needs to make kernels: the variable that names a compiler, and the names
    of compilers.
    """
    scales_gradients = True
    """Whether a GradScaler works on the device, as float16 needs."""
    capturable: tuple[str, ...] = ()
    """The optimizers that count steps on the device, whose powers are float32. With a count on the
    host they would read a number of the device back in each step.
    """
    is_cloud: bool = False
    """Whether this is a Compute Engine machine, which announces its preemption."""
    steps_block = True
    """Whether the device has computed a step when the step returns."""
    host: int = 0
    num_hosts: int = 1
    num_replicas: int = 1

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.device = self._find_device()
        if precision == "fp16" and not self.scales_gradients:
            raise ConfigError(
                f"precision fp16: strategy {self.strategy} on the device {self.device} does not"
                " scale gradients, which float16 needs; use --precision bf16 or fp32"
            )
        self.heartbeat = HeartbeatClient()
        self._profiler: Any = None
        self._own_place: torch.Tensor | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the complete run. A global batch must be a multiple of it."""
        return self.num_hosts

    @property
    def replica(self) -> int:
        """The number of the model copy that this process computes.

        Each draws its own random numbers (dropout).
        """
        return self.host

    @property
    def is_master(self) -> bool:
        """Whether this process writes the output that a run writes once."""
        return self.host == 0

    def connect(self, timeout_s: float) -> None:
        """Connects to the other processes. From here on they compute together.

        `timeout_s` limits how long one process may then wait for another, which may itself wait for
        data.
        """

    def close(self) -> None:
        """Leaves the group of processes, if there is one."""

    def _find_device(self) -> torch.device:
        return torch.device("cpu")

    def num_rows(self, global_batch_size: int, accumulate: int) -> int:
        """The rows that every process brings to a step: one shape for all, whatever the sizes of
        their shares.

        Raises ConfigError unless there is a sample for every device in each of so many passes.
        """
        least = self.num_devices * accumulate
        if global_batch_size < least:
            raise ConfigError(
                f"global_batch_size {global_batch_size} does not have a sample for each of"
                f" {self.num_devices} devices"
                + (f" in each of {accumulate} passes" if accumulate > 1 else "")
                + f"; use at least {least}, or fewer devices"
            )
        unit = max(1, self.num_devices // self.num_hosts) * accumulate
        return -(-global_batch_size // (self.num_hosts * unit)) * unit

    # --- moving data ------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> nn.Module:
        """The module on the device; the same object if the back end allows it."""
        return moved(module, self.device)

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        """The batch on the device.

        Each tensor is split along its first dimension over the local devices.
        """
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def to_host(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state with every tensor on the CPU, in its own memory."""
        return {name: copied(value) for name, value in state.items()}

    def mark_replicated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declares that every replica holds a full copy of these device tensors for
        the whole run.
        """

    def accelerate(self, modules: Iterable[nn.Module], *, compile: bool | None, tf32: bool) -> None:
        """Has the device compute these models fast, as the config says.

        XLA compiles whole steps in any case.
        """
        obstacle = self.compile_obstacle()
        if compile and obstacle is not None:
            raise ConfigError(
                f"compile is true, but torch.compile can't make kernels here: {obstacle}; or set it"
                " to false"
            )
        wanted = self.compiles_models if compile is None else compile
        if wanted and obstacle is None:
            for module in modules:
                module.compile(backend=self.compile_backend, dynamic=False)

    def compile_obstacle(self) -> str | None:
        """Why torch.compile can make no kernels for the device on this machine; None if it can."""
        return compile_obstacle(*self.compiler) if self.compile_backend == "inductor" else None

    def optimizer_options(self, name: str) -> dict[str, Any]:
        """The options of an optimizer that suit the device."""
        return {"capturable": True} if name in self.capturable else {}

    def synchronize_norms(self, model: nn.Module) -> nn.Module:
        """The model with a BatchNorm that sees the global batch.

        Raises ConfigError where it can't.
        """
        return model

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """The module that the training step calls in place of the model, so that gradients are
        averaged.
        """
        return model

    def no_sync(self, parallel: nn.Module) -> AbstractContextManager[None]:
        """Backward passes of `data_parallel`'s module that only add to the gradients, which a later
        one averages.
        """
        return nullcontext()

    # --- stepping ---------------------------------------------------------------------------------

    def compiled(self, step: Step, name: str) -> Step:
        """The step, compiled if the back end compiles."""
        return step

    def seed(self, key: int) -> None:
        """Seeds the randomness inside the model, such as dropout, from the key and the replica
        only.
        """
        torch.manual_seed(replica_key(key, self.replica))

    def autocast(self) -> AbstractContextManager[None]:
        """Computes in the precision of the run where that is safe.

        Weights and loss stay float32.
        """
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "fp32")

    def number(self, value: float) -> float | torch.Tensor:
        """A number that changes between steps, as a step needs it."""
        return value

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Averages gradients over replicas, unless the backward pass does so."""

    def update(
        self, optimizer: torch.optim.Optimizer, rate: float | torch.Tensor, scaler: GradScaler
    ) -> None:
        """One step of the optimizer at a rate (see `number`), and no gradients left.

        The scaler, which is enabled for float16 only, skips the step if a gradient is not finite.
        A group's `lr_scale`, if it has one, multiplies its rate.
        """
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def sum_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor summed over replicas, on the device, as part of a step."""
        return tensor

    def of_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, columns] of this replica at their place among zeros: summed over replicas, they
        are the rows of all.

        On the device, as part of a step: [replicas * n, columns].
        """
        if self.num_replicas == 1:
            return rows
        if self._own_place is None:  # a tensor, so that all replicas compute one graph
            self._own_place = (
                (torch.arange(self.num_replicas) == self.replica).view(-1, 1, 1).to(self.device)
            )
        return torch.where(self._own_place, rows, 0.0).flatten(0, 1)

    # --- agreeing ---------------------------------------------------------------------------------

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The results of steps, summed over replicas: float64 [rows, columns] on the CPU.

        Awaits these steps, but none after them, so the device stays busy with the next one.
        """
        return self.sum_replicas(self._read(rows).double())

    def _read(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        # One by one: a kernel that joins them would run after the steps that are under way.
        return torch.stack([row.cpu() for row in rows])

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        """Integers from 0 to 2**63, summed over processes. Every process must call it."""
        return list(values)

    def any_host(self, flag: bool) -> bool:
        """Whether the flag is set in any process. Every process must call it."""
        return self.sum_hosts([int(flag)])[0] > 0

    def ask_hosts(self, flag: bool) -> Callable[[], bool]:
        """Begins `any_host`; what it returns gives the answer, and may wait for it.

        Every process must call both.
        """
        answer = self.any_host(flag)
        return lambda: answer

    def text_of_master(self, text: str) -> str:
        """The text of the first process. Every process must call it.

        As sums of bytes: no other exchange works for every strategy. Under SPMD torch_xla's
        `rendezvous` and `all_gather` know one host, and there is no group of torch.distributed.
        """
        data = text.encode() if self.is_master else b""
        [num_bytes] = self.sum_hosts([len(data)])
        return bytes(self.sum_hosts(list(data.ljust(num_bytes, b"\0")))).decode()

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Copies the buffers (BatchNorm statistics) of replica 0 to every replica."""

    def heartbeat_address(self, exits: ExitStack) -> Address | None:
        """Where the processes send heartbeats; None if there is only one process.

        Every process must call it.

        The first process starts the server, which `exits` stops.
        """
        return None

    # --- measuring --------------------------------------------------------------------------------

    @property
    def compilations(self) -> int:
        """The number of graphs that this process has compiled."""
        return 0

    def start_trace(self, folder: Path) -> None:
        """Starts a profile."""
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def stop_trace(self, folder: Path) -> None:
        """Ends the profile and writes it to the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(folder / f"host-{self.host:03d}.json"))


class Single(Runtime):
    """The strategy of one process with one device, here the CPU."""

    strategy = "single"


def replica_key(key: int, replica: int) -> int:
    """A replica's own random key, 63 bits."""
    return (key >> 1) ^ replica


def copied(tree: Any) -> Any:
    """Nested dicts, lists and tuples with a copy of each tensor on the CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {name: copied(value) for name, value in tree.items()}
    return type(tree)(map(copied, tree)) if isinstance(tree, list | tuple) else tree


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on a device.

    Weights that layers share stay shared, where the back end gives each layer its own.
    """
    names = defaultdict[int, list[str]](list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    module = module.to(device)
    for first, *others in names.values():
        for name in others:
            owner, _, own_name = name.rpartition(".")
            setattr(module.get_submodule(owner), own_name, module.get_parameter(first))
    return module
