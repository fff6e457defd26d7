"""What the model made of single samples: rows that leave the device with the sums of a step, and files of them."""

import io
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from shardset.storage.base import Storage
from trainer.data.device_feed import ID_BASE
from trainer.record.metrics import NUM_SUMS

OUTCOME = np.dtype([("id", "<i8"), ("loss", "<f4"), ("label", "<i4"), ("predicted", "<i4")])
"""A sample as a step saw it; it was right if it predicted the label."""

LOSSES = "losses/"


def outcome_rows(
    ids: torch.Tensor, losses: torch.Tensor, labels: torch.Tensor, predicted: torch.Tensor
) -> torch.Tensor:
    """The samples of a step on the device: float32 [n, 5]. `ids` are those of device_feed.ids_as_floats."""
    return torch.cat([ids, torch.stack([losses, labels.float(), predicted.float()], 1)], 1)


def outcomes_of(rows: torch.Tensor) -> np.ndarray:
    """The samples behind the sums in fetched rows [steps, 4 + 5 n], without pads: OUTCOME [m], step by step."""
    columns = rows[:, NUM_SUMS:].reshape(-1, 5).numpy().T
    outcomes = np.empty(columns.shape[1], OUTCOME)
    outcomes["id"] = columns[0] + ID_BASE * columns[1]
    outcomes["loss"], outcomes["label"], outcomes["predicted"] = columns[2:]
    return outcomes[outcomes["id"] >= 0]


def losses_name(epoch: int) -> str:
    """`losses/epoch-003.parquet`; people count epochs from 1."""
    return f"{LOSSES}epoch-{epoch + 1:03d}.parquet"


def losses_file(outcomes: np.ndarray, first_ids: Sequence[int]) -> bytes:
    """The losses of an epoch as Parquet: `id`, `loss` and `top1` (bool), a row for each time that a step saw a sample.

    `first_ids` are those of the sets of a mixture: then `source` is the number of the set, and `id` counts in it.
    """
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"id": outcomes["id"], "loss": outcomes["loss"], "top1": outcomes["label"] == outcomes["predicted"]}
    if len(first_ids) > 1:
        columns["source"] = np.searchsorted(first_ids, columns["id"], side="right") - 1
        columns["id"] = columns["id"] - np.asarray(first_ids)[columns["source"]]
    buffer = io.BytesIO()
    parquet.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def read_losses(folder: Storage, first_ids: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Ids, losses and whether they were right, of each epoch whose losses a run folder has, oldest first."""
    from pyarrow import parquet

    for stat in folder.list(LOSSES):
        table = parquet.read_table(io.BytesIO(folder.read(stat.name)))
        ids, loss, top1 = (table[name].to_numpy() for name in ("id", "loss", "top1"))
        if len(first_ids) > 1:
            ids = ids + np.asarray(first_ids)[table["source"].to_numpy()]
        yield ids, loss, top1
