"""A run written down in plain torch: of the trainer it has the batches, their mixing, the keys and
first weights.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from trainer.config import TrainConfig
from trainer.data.splits import open_data
from trainer.model import batch_transforms, networks
from trainer.model.learner import step_key
from trainer.runtime.base import replica_key

MEAN, STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))

Batch = dict[str, torch.Tensor]


def plain_run(
    config: TrainConfig,
    rates: Sequence[float],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
) -> list[float]:
    """The loss of each step of a run on one device."""
    data = open_data(config, 0, 1)
    net = networks.build(config.model, data.num_classes, config.seed).train()
    optimizer, losses, regularize = optimizer_of(net), [], config.regularize
    for step, (rate, batch) in enumerate(zip(rates, batches_of(config), strict=True)):
        images, targets = images_and_targets(config, batch, data.num_classes)
        torch.manual_seed(replica_key(step_key(config.seed, *divmod(step, len(data.train))), 0))
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
            logits = net(images)
        each = cross_entropy(logits.float(), targets, reduction="none")
        loss = (each * batch["weight"]).sum() / batch["weight"].sum()
        optimizer.zero_grad()
        loss.backward()
        if regularize.clip_norm:
            nn.utils.clip_grad_norm_(net.parameters(), regularize.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches_of(config: TrainConfig) -> Iterator[Batch]:
    """The global batches of a run in order; `mix` is the row of how the batch is mixed."""
    stream = open_data(config, 0, 1).train
    for epoch, step, batch in stream.run(
        iter([(epoch, range(len(stream))) for epoch in range(config.epochs)])
    ):
        whole: dict[str, Any] = batch_transforms.with_mix(config, dict(batch), epoch, step)
        names = ("image", "label", "weight", "flip", "mix")
        yield {name: torch.as_tensor(whole[name]) for name in names if name in whole}


def images_and_targets(
    config: TrainConfig, batch: Batch, num_classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as the model takes them, and the share of each class in each of them."""
    images = ((batch["image"].float() / 255 - MEAN) / STD).permute(0, 3, 1, 2)
    images = torch.stack(
        [one.flip(2) if flip else one for one, flip in zip(images, batch["flip"], strict=True)]
    )
    smoothing = config.regularize.label_smoothing
    targets = (1 - smoothing) * one_hot(batch["label"], num_classes) + smoothing / num_classes
    if "mix" in batch:
        for start in range(config.accumulate):
            # samples of one pass are mixed with each other
            part = slice(start, None, config.accumulate)
            row, repeats = batch["mix"][0].tolist(), config.image.augment_repeats
            images[part], targets[part] = mixed_by_hand(images[part], targets[part], row, repeats)
    return images, targets


def mixed_by_hand(
    images: torch.Tensor, targets: torch.Tensor, row: list[float], repeats: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each image mixed with its neighbour; a box shows the neighbour only."""
    other = neighbours(len(images), repeats)
    share, (top, bottom, left, right) = row[0], map(int, row[1:])
    mixed = share * images + (1 - share) * images[other]
    mixed[:, :, top:bottom, left:right] = images[other][:, :, top:bottom, left:right]
    own = share * (1 - (bottom - top) * (right - left) / images[0, 0].numel())
    return mixed, own * targets + (1 - own) * targets[other]


def neighbours(num_rows: int, repeats: int = 1) -> list[int]:
    """Of each pair of samples the other one: each is `repeats` rows,
    and both are read backwards.
    """
    rows, size = list(range(num_rows)), 2 * repeats
    return [
        row for start in range(0, num_rows, size) for row in reversed(rows[start : start + size])
    ]
