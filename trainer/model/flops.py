"""The share of a device's peak that a run uses: the FLOPs of its model, counted once from shapes, over the peak."""

import re
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainer.config import TrainConfig
from trainer.model import build

PEAKS = {
    "MIG": None,  # a part of a GPU
    "H200 NVL": None,
    "H200": 989.4e12,
    "H100 PCIe": 756.0e12,
    "H100 NVL": 835.0e12,
    "H100": 989.4e12,
    "A100": 312.0e12,
    "L40S": 362.0e12,
    "L40": 181.05e12,
    "L4": 121.0e12,
}
"""Dense bfloat16 FLOP/s by words of the device's name, the first that fit: NVIDIA's data sheets of these products.
Where they give twice as much, they count the zeros of sparse matrices. None: not known."""


def flops_per_sample(config: TrainConfig, num_classes: int) -> int | None:
    """FLOPs of a forward and a backward pass for one image; None if shapes alone do not tell.

    Activations that are computed again do not count, as usual for this share.
    """
    model = replace(config.model, pretrained=None, checkpoint_activations=False)
    net = build.build(model, num_classes, config.seed)
    build.freeze(net, model)
    shapes = net.to("meta")
    build.set_training(shapes, model)
    num_images = 2  # BatchNorm refuses a single value
    images = torch.empty(num_images, 3, config.image.size, config.image.size, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            shapes(images).sum().backward()
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError):
        return None
    return int(counter.get_total_flops()) // num_images


def peak_of(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device; None for one that is not in the table."""
    words = set(re.split(r"[\s-]+", device_name))
    return next((peak for product, peak in PEAKS.items() if words.issuperset(product.split())), None)


def share_of_peak(config: TrainConfig, num_classes: int, device: torch.device) -> float | None:
    """The share of a device's peak that one image a second takes; None where the peak is not known.

    That is on other devices than CUDA's, in float32, and for a model of yours, which may count its calls.
    """
    name = config.model.name
    is_own = ":" in name and not name.startswith("trainer.")
    if device.type != "cuda" or config.precision != "bf16" or is_own:
        return None
    peak = peak_of(torch.cuda.get_device_name(device))
    flops = flops_per_sample(config, num_classes) if peak else None
    return flops / peak if flops and peak else None
