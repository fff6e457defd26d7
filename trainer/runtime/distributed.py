"""`ddp`: one process for each device, joined by torch.distributed: on CPUs, GPUs and TPUs."""

import datetime
import functools
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardset.errors import ConfigError
from shardset.stream.world import num_local_processes
from trainer.config import Precision
from trainer.errors import PeerLost, first_line
from trainer.runtime import torchtpu
from trainer.runtime.base import Runtime, Step
from trainer.runtime.cuda import Cuda
from trainer.runtime.heartbeat import AGAIN, Address, HeartbeatServer, find_server

SERVER_KEY = "heartbeat server"
"""The key of the store under which RANK 0 publishes the host, port and token of its heartbeat
server.
"""


class Ddp(Runtime):
    """One process of several that torchrun or TorchTPU's launch starts, each with one device."""

    strategy = "ddp"
    backend = "gloo"
    """Of torch.distributed. Hosts agree on numbers by gloo, not on the device."""

    def __init__(self, precision: Precision) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            value = os.environ.get(name, "")
            if not (value if name == "MASTER_ADDR" else value.isdecimal()):
                expected = "an address" if name == "MASTER_ADDR" else "a whole number"
                raise ConfigError(
                    f"strategy {self.strategy}: {name} is {value or 'not set'}, expected"
                    f" {expected}; start it with `torchrun --nproc-per-node N -m trainer ...`"
                )
        self.host, self.num_hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.num_replicas = self.num_hosts
        super().__init__(precision)

    def connect(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        timeout = datetime.timedelta(seconds=timeout_s)
        # Until here the store had the patience of a start.
        self._store.set_timeout(timeout)
        try:
            dist.init_process_group(
                self.backend,
                store=self._store,
                rank=self.host,
                world_size=self.num_hosts,
                timeout=timeout,
            )
        except (RuntimeError, ValueError) as error:
            if (loss := self.heartbeat.loss()) is not None:
                raise PeerLost(loss) from error
            raise ConfigError(
                f"strategy {self.strategy}: RANK {self.host} of WORLD_SIZE {self.num_hosts} could"
                f" not join the others ({first_line(error)}); each process needs another RANK"
                " below the same WORLD_SIZE, and a network interface that the others reach: if"
                " gloo chose another, name it in GLOO_SOCKET_IFNAME"
            ) from error

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def data_parallel(self, model: nn.Module) -> nn.Module:
        # Training does not read the buffers, so they are broadcast only before an evaluation or a
        # checkpoint.
        with self._peer_errors():
            return DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def synchronize_norms(self, model: nn.Module) -> nn.Module:
        if self.num_hosts > 1:
            raise ConfigError(
                "sync_batch_norm is true, but torch has such a BatchNorm for CUDA devices only; use"
                " --strategy single, or --set model.norm=group"
            )
        return model

    def no_sync(self, parallel: nn.Module) -> AbstractContextManager[None]:
        return (
            parallel.no_sync()
            if isinstance(parallel, DistributedDataParallel)
            else super().no_sync(parallel)
        )

    def compiled(self, step: Step, name: str) -> Step:
        return self._peer_errors()(super().compiled(step, name))

    def sum_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        summed = tensor.detach().clone()
        with self._peer_errors():
            dist.all_reduce(summed)
        return summed

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        if self.num_hosts == 1:
            return list(values)
        return self.sum_replicas(torch.tensor(list(values), dtype=torch.int64)).tolist()

    def broadcast_buffers(self, module: nn.Module) -> None:
        with self._peer_errors():
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def heartbeat_address(self, exits: ExitStack) -> Address | None:
        if self.num_hosts == 1:
            return None
        try:
            if self.is_master:
                master = os.environ["MASTER_ADDR"]
                is_local = master in ("localhost", "127.0.0.1", "::1")
                on_one_machine = is_local or num_local_processes() == self.num_hosts
                host = "127.0.0.1" if on_one_machine else ""
                address = Address(host, 0, secrets.token_hex(16))
                bound = exits.enter_context(HeartbeatServer(address, self.heartbeat.timing)).address
                published = bound._replace(host=host or master)
                self._store.set(SERVER_KEY, json.dumps(published))
            else:
                published = find_server(
                    lambda: Address(*json.loads(self._store.get(SERVER_KEY))),
                    self.heartbeat.timing,
                )
        except RuntimeError as error:
            raise PeerLost(
                "the process of RANK 0 ended at its start, or does not answer at port"
                f" {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']}"
                f" ({first_line(error)}); its log says why; {AGAIN}"
            ) from error
        # torchrun keeps its store over restarts, and its count of them differs between machines.
        # The token is new in each start of RANK 0, and known to those who start with it.
        self._store = dist.PrefixStore(published.token, self._store)
        return published

    @functools.cached_property
    def _store(self) -> dist.Store:
        """The store through which the ddp processes find each other.

        RANK 0 opens it unless torchrun has done so.
        """
        timing = self.heartbeat.timing
        is_server = self.is_master and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = datetime.timedelta(seconds=timing.grace_s if is_server else timing.join_s)
        try:
            store = dist.TCPStore(
                host, port, is_master=is_server, timeout=patience, wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            if is_server:
                raise ConfigError(
                    f"strategy ddp: can't listen on port {port} of {host}, as MASTER_ADDR and"
                    f" MASTER_PORT say ({first_line(error)}); each process needs another RANK,"
                    " each run another port"
                ) from error
            raise PeerLost(
                f"the process of RANK 0 did not open port {port} of {host} within"
                f" {timing.join_s:.0f} s ({first_line(error)}): see in its log whether it ended at"
                " its start, and start all processes with the same MASTER_ADDR and MASTER_PORT"
            ) from error
        store.set_timeout(datetime.timedelta(seconds=timing.join_s))
        return store

    @contextmanager
    def _peer_errors(self) -> Iterator[None]:
        """Turns torch's errors about a lost process into PeerLost.

        Gloo's have no separate class.
        """
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            text = f"another process of this run ended, or did not answer for {self._timeout_s} s"
            raise PeerLost(
                self.heartbeat.loss() or f"{text} ({first_line(error)}); its log says why; {AGAIN}"
            ) from error


class CudaDdp(Ddp, Cuda):
    """One process of several, with one CUDA device."""

    backend = "cpu:gloo,cuda:nccl"

    def _find_device(self) -> torch.device:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return super()._find_device()

    def synchronize_norms(self, model: nn.Module) -> nn.Module:
        from timm.layers import norm_act  # late: it imports all of timm

        convert: Any = norm_act.convert_sync_batchnorm  # has no types
        synchronized: nn.Module = convert(model)
        return synchronized


class TpuDdp(Ddp, torchtpu.TorchTpu):
    """One process of several, with one TPU chip, the only one that it sees."""

    backend = torchtpu.BACKEND

    def _find_device(self) -> torch.device:
        torchtpu.check_environment(os.environ)
        return super()._find_device()

    def compiled(self, step: Step, name: str) -> Step:
        # All processes take the same steps, so TorchTPU may compile an exchange together with what
        # is around it.
        return super().compiled(torchtpu.spmd_safe(step), name)
