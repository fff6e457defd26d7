"""The training loss of each sample: cross-entropy or binary cross-entropy, smoothed, also of mixed images."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from trainer.config import RegularizeConfig


def losses_of(
    config: RegularizeConfig, logits: torch.Tensor, labels: torch.Tensor, own_share: torch.Tensor | None
) -> torch.Tensor:
    """float32 [B]. With `own_share`, an image is mixed with its partner, which is the batch read backwards."""
    if config.loss == "bce":
        targets = soft_targets(labels, own_share, logits.shape[1], config.label_smoothing)
        if config.bce_threshold is not None:
            targets = targets.gt(config.bce_threshold).float()
        return binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
    own = cross_entropy(logits, labels, reduction="none", label_smoothing=config.label_smoothing)
    if own_share is None:
        return own
    partner = cross_entropy(logits, labels.flip(0), reduction="none", label_smoothing=config.label_smoothing)
    return own_share * own + (1 - own_share) * partner


def soft_targets(
    labels: torch.Tensor, own_share: torch.Tensor | None, num_classes: int, smoothing: float
) -> torch.Tensor:
    """The share of each class in each image: float32 [B, classes]; smoothing gives all classes a part, as in timm."""
    # Compared and not scattered: a graph without indexes, which every compiler splits over devices.
    classes = torch.arange(num_classes, device=labels.device)
    own = (labels.unsqueeze(1) == classes).float() * (1 - smoothing) + smoothing / num_classes
    if own_share is None:
        return own
    share = own_share.unsqueeze(1)
    return share * own + (1 - share) * own.flip(0)
