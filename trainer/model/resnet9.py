"""ResNet-9: the network of David Page's "How to train your ResNet", for pictures of 32 pixels."""

import torch
from torch import nn

WIDTHS = (64, 128, 256, 512)
SCALE = 0.125
"""What the last layer's outputs are multiplied by."""


class ResNet9(nn.Module):
    """Eight convolutions and a linear layer; the second and the last stage have a block with a shortcut."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        prep, first, second, third = WIDTHS
        self.features = nn.Sequential(
            _convolution(3, prep),
            _convolution(prep, first),
            nn.MaxPool2d(2),
            Shortcut(first),
            _convolution(first, second),
            nn.MaxPool2d(2),
            _convolution(second, third),
            nn.MaxPool2d(2),
            Shortcut(third),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.fc = nn.Linear(third, num_classes, bias=False)

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.fc

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = SCALE * self.fc(self.features(images_NCHW))
        return logits


class Shortcut(nn.Module):
    """Two convolutions, whose result is added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(_convolution(width, width), _convolution(width, width))

    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = features_NCHW + self.inner(features_NCHW)
        return added


def resnet9(num_classes: int) -> nn.Module:
    """A ResNet of nine layers and 6.6 million weights for pictures of 32 pixels."""
    return ResNet9(num_classes)


def _convolution(width_in: int, width_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width_in, width_out, 3, padding=1, bias=False), nn.BatchNorm2d(width_out), nn.ReLU())
