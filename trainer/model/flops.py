"""The share of a device's peak that a run uses: the FLOPs of its model, counted once from shapes,
over the peak.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainer.config import TrainConfig
from trainer.model import build

PEAKS = {
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756.0e12,
    "NVIDIA H100 NVL": 835.0e12,
    "NVIDIA A100-PCIE-40GB": 312.0e12,
    "NVIDIA A100-SXM4-40GB": 312.0e12,
    "NVIDIA A100-SXM4-80GB": 312.0e12,
    "NVIDIA A100 80GB PCIe": 312.0e12,
    "NVIDIA L40S": 362.0e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA L4": 121.0e12,
}
"""Dense bfloat16 FLOP/s by the device's whole name: NVIDIA's data sheets, without the zeros of
sparse matrices.
"""


def share_of_peak(config: TrainConfig, num_classes: int, device: torch.device) -> float | None:
    """The share of a device's peak that a step takes for one image a second; None where it is not
    known.

    That is on devices that are not in PEAKS, in float32, and for a model of yours, which may count
    its calls. Activations that are computed again do not count.
    """
    name = config.model.name
    is_own = ":" in name and not name.startswith("trainer.")
    peak = PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None or config.precision != "bf16" or is_own:
        return None
    net = build.shapes_of(config.model, num_classes)
    build.freeze(net, config.model)
    build.set_training(net, config.model)
    # BatchNorm refuses one image
    images = torch.empty(2, 3, config.image.size, config.image.size, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            net(images).sum().backward()
    # it needs numbers
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError):
        return None
    return int(counter.get_total_flops()) / len(images) / peak
