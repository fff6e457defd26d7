"""The row of a step: what it returns from the device, and what becomes of it on the host.

A row begins with the sums of `SUMS` over the samples of the batch, each with its weight. If the
run asks what became of each sample, its `COLUMNS` follow, sample by sample. All of it is float32,
and rows of replicas are added up: `Runtime.of_all` gives each sample a separate place.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

SUMS = ("loss", "weight", "top1", "top5")
COLUMNS = ("low id", "high id", "loss", "label", "predicted")

OUTCOME = np.dtype([("id", "<i8"), ("loss", "<f4"), ("label", "<i4"), ("predicted", "<i4")])
"""A sample as a step saw it; it was right if it predicted the label."""

ID_BASE = 1 << 24
"""Ids go to a device as two digits to this base, each of which float32 holds exactly."""


def ids_as_floats(ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Ids as float32 [n, 2], the lower digit to `ID_BASE` first; pads become -1."""
    return np.stack(np.divmod(np.where(weights > 0, ids, -1), ID_BASE)[::-1], 1).astype(np.float32)


class Seen(NamedTuple):
    """One pass on the device: its sums, and its samples [n, columns] if their ids were given."""

    sums: torch.Tensor
    samples: torch.Tensor | None


def seen(batch: dict[str, torch.Tensor], losses: torch.Tensor, logits: torch.Tensor) -> Seen:
    """The `SUMS` of a pass, and the `COLUMNS` of its samples if the batch has their ids, which come
    from `ids_as_floats`.
    """
    labels, weights = batch["label"], batch["weight"]
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = best.eq(labels.unsqueeze(1)).float() * weights.unsqueeze(1)
    sums = torch.stack([(losses * weights).sum(), weights.sum(), hits[:, 0].sum(), hits.sum()])
    if "id" not in batch:
        return Seen(sums, None)
    columns = torch.stack([losses, labels.float(), best[:, 0].float()], 1)
    return Seen(sums, torch.cat([batch["id"], columns], 1))


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of the rows of some steps.

    `outcomes` are the samples themselves, OUTCOME [n] of some steps each, where the steps had their
    ids.
    """

    loss: float = 0.0
    weight: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    outcomes: tuple[np.ndarray, ...] = field(default=(), compare=False, kw_only=True)

    @property
    def sums(self) -> list[float]:
        """In the order of `SUMS`."""
        return [getattr(self, name) for name in SUMS]

    @property
    def samples(self) -> np.ndarray:
        """All outcomes: OUTCOME [n]."""
        return np.concatenate([np.empty(0, OUTCOME), *self.outcomes])

    def add(self, rows: torch.Tensor) -> "Totals":
        """These sums plus the sums of some steps, given as their fetched rows."""
        new = rows[:, : len(SUMS)].sum(0).tolist()
        sums = np.add(self.sums, new).tolist()
        outcomes = [_outcomes_of(rows)] if rows.shape[1] > len(SUMS) else []
        return Totals(*sums, outcomes=(*self.outcomes, *outcomes))

    def mean(self, name: str) -> float:
        """The weighted mean of `loss`, `top1` or `top5` over samples; 0 over none."""
        total: float = getattr(self, name)
        return total / self.weight if self.weight else 0.0

    def __str__(self) -> str:
        return f"loss {self.mean('loss'):.4f}, accuracy {self.mean('top1'):.4f}"


def _outcomes_of(rows: torch.Tensor) -> np.ndarray:
    """The samples behind the sums in fetched rows, without pads: OUTCOME [m]."""
    low, high, *others = rows[:, len(SUMS) :].reshape(-1, len(COLUMNS)).numpy().T
    outcomes = np.empty(len(low), OUTCOME)
    outcomes["id"] = low + ID_BASE * high
    outcomes["loss"], outcomes["label"], outcomes["predicted"] = others
    return outcomes[outcomes["id"] >= 0]
