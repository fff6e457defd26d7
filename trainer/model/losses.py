"""The training loss of each sample: cross-entropy or binary cross-entropy, smoothed, also of mixed
images.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from trainer.config import RegularizeConfig


class Partners(NamedTuple):
    """The content of mixed images: their own share, float32 [B], and the label of the rest, int64
    [B].
    """

    own_share: torch.Tensor
    labels: torch.Tensor


def losses_of(
    config: RegularizeConfig, logits: torch.Tensor, labels: torch.Tensor, partners: Partners | None
) -> torch.Tensor:
    """float32 [B]; `partners` belong to mixed images."""
    if config.loss == "bce":
        targets = _one_class(labels, logits.shape[1], config.label_smoothing)
        if partners is not None:
            share = partners.own_share.unsqueeze(1)
            others = _one_class(partners.labels, logits.shape[1], config.label_smoothing)
            targets = share * targets + (1 - share) * others
        if config.bce_threshold is not None:
            targets = targets.gt(config.bce_threshold).float()
        return binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
    losses = cross_entropy(logits, labels, reduction="none", label_smoothing=config.label_smoothing)
    if partners is None:
        return losses
    partner_losses = cross_entropy(
        logits, partners.labels, reduction="none", label_smoothing=config.label_smoothing
    )
    return partners.own_share * losses + (1 - partners.own_share) * partner_losses


def _one_class(labels: torch.Tensor, num_classes: int, smoothing: float) -> torch.Tensor:
    """The share of each class in each image: float32 [B, classes]; smoothing gives all classes a
    part, as in timm.
    """
    # Compared and not scattered: a graph without indexes, which every compiler splits over devices.
    classes = torch.arange(num_classes, device=labels.device)
    return (labels.unsqueeze(1) == classes).float() * (1 - smoothing) + smoothing / num_classes
