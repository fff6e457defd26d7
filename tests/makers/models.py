"""A small model and a random batch for a step of the trainer."""

import torch
from torch import nn

FLAT = f"{__name__}:flat"


def flat(num_classes):
    """A model without norms, which make much of a rounding where an image has hardly any contrast
    left.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))


def batch_of(num, *, size=8, classes=5, seed=0):
    """Images of so many pixels, with labels."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randint(0, 256, (num, size, size, 3), generator=draw, dtype=torch.uint8),
        "label": torch.randint(0, classes, (num,), generator=draw),
        "weight": torch.ones(num),
    }
