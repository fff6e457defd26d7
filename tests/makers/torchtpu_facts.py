"""What holds of the real TorchTPU on a machine without a TPU, as JSON: run by the Python of
`scripts.venvs.TORCHTPU`.

    python -m tests.makers.torchtpu_facts FACT

Each fact is a separate process: TorchTPU reads environment variables once, and a device is
registered for good.
"""

import importlib.metadata
import inspect
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardset.errors import ConfigError
from trainer.runtime import torchtpu
from trainer.runtime.distributed import TpuDdp
from trainer.runtime.launch import choose, device_type
from trainer.tpu import processes


def loading() -> dict[str, Any]:
    """How torch finds TorchTPU, and what it finds here."""
    return {
        "entry points": [
            one.value for one in importlib.metadata.entry_points(group="torch.backends")
        ],
        "is loaded": "torch_tpu" in sys.modules,
        "is available": torchtpu.is_available(),
        "auto": choose("auto"),
        "device": device_type(),
    }


def names() -> dict[str, Any]:
    """The signatures that the trainer relies on, and what TorchTPU refuses to callers outside
    torch.
    """
    module: Any = torchtpu.module()
    try:
        refusal = str(module.is_available())
    except RuntimeError as error:
        refusal = str(error)
    return {
        "set_tpu_launch_env": str(inspect.signature(module.distributed.set_tpu_launch_env)),
        "spmd_safe": list(inspect.signature(module.distributed.spmd_safe).parameters),
        "is_available": refusal,
    }


def device() -> dict[str, Any]:
    """What TorchTPU registers where there is a TPU."""
    from torch_tpu import _loader

    _loader._init_device("tpu")
    backends = dist.distributed_c10d.BackendConfig(
        dist.Backend(TpuDdp.backend)
    ).get_device_backend_map()
    os.environ |= {torchtpu.ADDRESSES: "localhost:1", torchtpu.TOPOLOGY: "1,1,1"}
    runtime = TpuDdp("bf16")
    runtime.accelerate([], compile=None, tf32=True)
    rounded = torch.get_float32_matmul_precision()
    runtime.accelerate([], compile=None, tf32=False)
    return {
        "device": str(torch.device("tpu")),
        "backends": backends,
        "is known": [dist.is_backend_available(name) for name in ("tpu_dist", "gloo")],
        "compile": TpuDdp.compile_backend in torch._dynamo.list_backends(exclude_tags=()),
        "precisions": [rounded, torch.get_float32_matmul_precision()],
        "autocast": torch.bfloat16 in torch.get_device_module("tpu").get_amp_supported_dtype(),
        "seeds": callable(torch.get_device_module("tpu").manual_seed_all),
        "is cloud": runtime.is_cloud,
        "step": torchtpu.spmd_safe(lambda value: value + 1)(torch.ones(1)).tolist(),
    }


def environment() -> dict[str, Any]:
    """What each process of this machine is told beside the variables of this process, or why none
    starts.
    """
    before = set(os.environ)
    try:
        number = int(os.environ.get("NUMBER", "0"))
        base = processes.launch_environment(json.loads(os.environ["WORKERS"]), number)
    except ConfigError as error:
        return {"error": str(error)}
    told = processes.environments_of(base, torchtpu.num_local_processes(base))
    return {
        "told": [{name: value for name, value in one.items() if name not in before} for one in told]
    }


if __name__ == "__main__":
    facts = {"loading": loading, "names": names, "device": device, "environment": environment}
    print(json.dumps(facts[sys.argv[1]]()))
