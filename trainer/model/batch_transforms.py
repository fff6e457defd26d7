"""The steps of a batch between the stream and the model: every random choice comes from a key.

On the host: how a batch is mixed (the stream has cropped the images and says which ones to mirror).
On the device: uint8 NHWC to normalised float NCHW, the mirroring and the mixing.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from shardset.order.permutation import derive_key
from trainer.config import Channels, ImageConfig, Spread, TrainConfig

PLAIN = ImageConfig()


def with_mix(config: TrainConfig, batch: dict[str, Any], epoch: int, step: int) -> dict[str, Any]:
    """The batch of (epoch, step) with `mix` (float32 [B, 5], see `mix_row`) for mixup and cutmix.

    The choice depends on (seed, epoch, step), never on the replica; see `partners`.
    """
    mixup, cutmix = config.regularize.mixup, config.regularize.cutmix
    if not (mixup or cutmix):
        return batch
    row = mix_row(mixup, cutmix, config.image.size, derive_key(config.seed, "mix", epoch, step))
    return {**batch, "mix": np.tile(row, (len(batch["label"]), 1))}


def mix_row(mixup: float, cutmix: float, size: int, key: int) -> np.ndarray:
    """One batch's mixing: float32 (share of the own image outside the box, top, bottom, left,
    right).

    Mixup is a share and no box; cutmix is the image itself outside a box that shows the partner.
    Where both are asked for, a keyed coin takes one.
    """
    draw = np.random.Generator(np.random.Philox(key=key))
    if cutmix and (not mixup or draw.random() < 0.5):
        half = size * (1 - draw.beta(cutmix, cutmix)) ** 0.5 / 2
        middle = draw.integers(0, size, 2)
        low = np.clip(np.round(middle - half), 0, size)
        high = np.clip(np.round(middle + half), 0, size)
        return np.array([1, low[0], high[0], low[1], high[1]], dtype=np.float32)
    return np.array([draw.beta(mixup, mixup), 0, 0, 0, 0], dtype=np.float32)


def partners(rows: torch.Tensor, repeats: int) -> torch.Tensor:
    """Of each row of a batch the partner's, in which images show one more sample: of two neighbours
    the other one.

    Each sample has `repeats` rows. Partners are near each other, so that a replica with whole pairs
    of samples needs no images of others, and any number of replicas mix a batch in the same way.
    What makes no pair is read backwards.
    """
    size = 2 * repeats
    in_pairs = len(rows) // size * size
    tail = rows[in_pairs:].flip(0)
    if not in_pairs:
        return tail
    pairs = rows[:in_pairs].unflatten(0, (-1, size)).flip(1).flatten(0, 1)
    return torch.cat([pairs, tail]) if len(tail) else pairs


class Normalize(nn.Module):
    """uint8 images to what the model takes, on the device."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Channels = PLAIN.mean, std: Spread = PLAIN.std) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(1, 3, 1, 1))

    def forward(self, images_NHWC: torch.Tensor, flip: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [B, 3, H, W], mirrored where `flip` says so."""
        images_NCHW = (images_NHWC.permute(0, 3, 1, 2).float() - self.mean) / self.std
        if flip is None:
            return images_NCHW
        return torch.where(flip.view(-1, 1, 1, 1), images_NCHW.flip(3), images_NCHW)


def mixed(
    images_NCHW: torch.Tensor, others_NCHW: torch.Tensor, mix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each image mixed with its partner's, and the own share of each: float32 [B].

    All tensors, no numbers: a share or a box that changes doesn't make a new graph.
    """
    rows = torch.arange(images_NCHW.shape[2], device=mix.device).view(1, -1, 1)
    columns = torch.arange(images_NCHW.shape[3], device=mix.device).view(1, 1, -1)
    share, top, bottom, left, right = (column.view(-1, 1, 1) for column in mix.unbind(1))
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    own_share = (share * (~inside)).unsqueeze(1)
    return images_NCHW * own_share + others_NCHW * (1 - own_share), own_share.mean(dim=(1, 2, 3))
