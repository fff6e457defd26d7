"""The losses of an epoch's samples as a Parquet file in the run folder. Importing this needs no torch."""

import io
from collections.abc import Iterator

import numpy as np

from shardset.errors import ConfigError
from shardset.storage.base import Storage
from trainer.data.mixture import ID_OF_SET

LOSSES = "losses/"


def losses_name(epoch: int) -> str:
    """`losses/epoch-003.parquet`; people count epochs from 1."""
    return f"{LOSSES}epoch-{epoch + 1:03d}.parquet"


def losses_file(outcomes: np.ndarray, *, is_mixture: bool) -> bytes:
    """The losses of an epoch, OUTCOME [n], as Parquet: `id`, `loss`, `top1` (bool); a row each time a step saw one.

    Of a mixture also `source`, the number of the set in which `id` counts.
    """
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"id": outcomes["id"], "loss": outcomes["loss"], "top1": outcomes["label"] == outcomes["predicted"]}
    if is_mixture:
        columns["source"], columns["id"] = np.divmod(outcomes["id"], ID_OF_SET)
    buffer = io.BytesIO()
    parquet.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def read_losses(folder: Storage, source: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(ids, losses, top1) of each epoch that a run folder has losses of; of one set, where they are of a mixture."""
    import pyarrow as pa
    import pyarrow.compute
    from pyarrow import parquet

    for stat in folder.list(LOSSES):
        try:
            table = parquet.read_table(io.BytesIO(folder.read(stat.name)))
            if "source" in table.column_names:
                table = table.filter(pa.compute.field("source") == source)
            ids, loss, top1 = (table[name].to_numpy() for name in ("id", "loss", "top1"))
        except (pa.ArrowException, KeyError) as error:
            raise ConfigError(f"{folder.url}/{stat.name}: not the losses of an epoch ({error}); delete it") from error
        yield ids, loss, top1
