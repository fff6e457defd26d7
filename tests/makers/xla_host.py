"""What one host of two draws and learns under spmd, as JSON: run as `python -m
tests.makers.xla_host HOST DEVICES`.

XLA:CPU can't join processes to one world, so each host has all of the mesh, and both get the same
global batch: on a slice each would hold its part of it. What a host is told of its number is real.
"""

import json
import os
import sys
from dataclasses import replace

import torch
from torch import nn

NUM_HOSTS = 2


def dropping(num_classes: int) -> nn.Module:
    """A model that drops units in one layer and whole samples in another."""
    from timm.layers import DropPath

    dropped = [nn.Linear(192, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), DropPath(0.5)]
    return nn.Sequential(nn.Flatten(), *dropped, nn.Linear(16, num_classes))


def main(host: int, devices: int) -> None:
    """Prints the number of the host, what dropout keeps of ones,
    and the weights after three steps.
    """
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices))
    import torch_xla.runtime as xr

    xr.process_index, xr.process_count = lambda: host, lambda: NUM_HOSTS
    from trainer import recipes
    from trainer.config import ModelConfig
    from trainer.model.learner import Learner, step_key
    from trainer.runtime.launch import running

    with running("spmd", "fp32") as spmd:
        spmd.seed(step_key(0, 0, 0))
        kept = nn.functional.dropout(torch.ones(8, 16, device=spmd.device)).cpu().tolist()
        model = ModelConfig(name="tests.makers.xla_host:dropping")
        learner = Learner(spmd, replace(recipes.digits_smoke(), model=model), 10, None)
        for step in range(3):
            learner.train_step(spmd.to_device(_batch(16, step)), 0.1, step_key(0, 0, step))
        weights = {name: value.tolist() for name, value in learner.state()["model"].items()}
        print(json.dumps({"host": [spmd.host, spmd.num_hosts], "kept": kept, "weights": weights}))


def _batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randint(0, 256, (size, 8, 8, 3), generator=draw, dtype=torch.uint8),
        "label": torch.randint(0, 10, (size,), generator=draw),
        "weight": torch.ones(size),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
