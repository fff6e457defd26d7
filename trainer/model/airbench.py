"""airbench: the network of Keller Jordan's airbench94, for pictures of 32 pixels."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.functional import unfold

WIDTHS = (64, 256, 256)
PATCH = 2
"""Width and height of the patches that the first layer whitens."""
NUM_IMAGES = 5000
"""Images whose patches say how to whiten."""
MIN_VARIANCE = 5e-4
"""Added to the variance of each direction, so that the weakest ones are not blown up."""
MOMENTUM = 0.4
"""The share of a batch in the statistics of norms, as torch counts; published as 0.6 of the ones before."""
SHIFT_SCALE = 8.0
SCALE = 1 / 9
"""What the last layer's outputs are multiplied by."""


class Airbench(nn.Module):
    """A convolution that whitens patches, six further ones in three stages, and a linear layer.

    The first layer's weights are not trained, its bias is. They follow from training images (`initialize_from`).
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        width_in = 2 * 3 * PATCH**2
        self.whitening = nn.Conv2d(3, width_in, PATCH)
        self.whitening.requires_grad_(False)
        self.whitening.bias = nn.Parameter(torch.zeros(width_in))
        stages = [_stage(*widths) for widths in zip((width_in, *WIDTHS), WIDTHS, strict=False)]
        self.features = nn.Sequential(nn.GELU(), *stages, nn.AdaptiveMaxPool2d(1), nn.Flatten())
        self.fc = nn.Linear(WIDTHS[-1], num_classes, bias=False)

    @torch.no_grad()
    def initialize_from(self, batches: Iterable[torch.Tensor]) -> None:
        """Has the first layer whiten the patches of these images: batches of float32 [n, 3, H, W], the first 5,000."""
        sums = torch.zeros(3 * PATCH**2, 3 * PATCH**2, dtype=torch.float64)
        num_patches, missing = 0, NUM_IMAGES
        for images_NCHW in batches:
            patches = unfold(images_NCHW[:missing], PATCH).transpose(0, 1).flatten(1).double()
            sums += patches @ patches.T
            num_patches += patches.shape[1]
            missing -= len(images_NCHW)
            if missing <= 0:
                break
        self.whitening.weight.copy_(whitening(sums / num_patches).view_as(self.whitening.weight))

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.fc

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = SCALE * self.fc(self.features(self.whitening(images_NCHW)))
        return logits


class Shift(nn.Module):
    """Adds a number to each channel: the bias of a norm, which SGD moves 64 times as fast as another weight.

    It is stored as an eighth. So its gradient is eight times as large, and each of its steps counts eight times.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        return features_NCHW + SHIFT_SCALE * self.bias.view(1, -1, 1, 1)


def airbench(num_classes: int) -> nn.Module:
    """A network of eight layers and 2 million weights for pictures of 32 pixels."""
    return Airbench(num_classes)


def whitening(moments: torch.Tensor) -> torch.Tensor:
    """The matrix [2n, n] that whitens vectors of these second moments [n, n]: each direction, then each opposite."""
    variances, directions = torch.linalg.eigh(moments)
    # LAPACK may turn a direction around, and all hosts must have the same weights.
    signs = directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    rows = (signs * directions / (variances + MIN_VARIANCE).sqrt()).T.flip(0)
    return torch.cat([rows, -rows])


def _stage(width_in: int, width_out: int) -> nn.Module:
    return nn.Sequential(
        _convolution(width_in, width_out), nn.MaxPool2d(2), _norm(width_out), nn.GELU(),
        _convolution(width_out, width_out), _norm(width_out), nn.GELU(),
    )  # fmt: skip


def _convolution(width_in: int, width_out: int) -> nn.Module:
    """A convolution whose first outputs begin as its inputs."""
    made = nn.Conv2d(width_in, width_out, 3, padding=1, bias=False)
    nn.init.dirac_(made.weight[:width_in])
    return made


def _norm(width: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(width, momentum=MOMENTUM, affine=False), Shift(width))
