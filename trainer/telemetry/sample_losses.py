"""The losses of an epoch's samples as a Parquet file in the run folder.

Importing this needs no torch.
"""

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
    """The losses of an epoch, OUTCOME [n], as Parquet: `id`, `loss`, `top1` (bool); a row each time
    a step saw one.

    Of a mixture also `source`, the number of the set in which `id` counts.
    """
    import pyarrow as pa

    from shardset.format.parquet import table_to_bytes

    columns = {
        "id": outcomes["id"],
        "loss": outcomes["loss"],
        "top1": outcomes["label"] == outcomes["predicted"],
    }
    if is_mixture:
        columns["source"], columns["id"] = np.divmod(outcomes["id"], ID_OF_SET)
    return table_to_bytes(pa.table(columns))


def read_losses(
    folder: Storage, source: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(ids, losses, top1) of each epoch that a run folder has losses of; of one set, where they are
    of a mixture.
    """
    import pyarrow.compute

    from shardset.format.parquet import open_table, parquet_errors

    def fail(reason: str) -> ConfigError:
        return ConfigError(f"{folder.url}/{name}: not the losses of an epoch ({reason}); delete it")

    for name in [stat.name for stat in folder.list(LOSSES)]:
        with parquet_errors(fail):
            table = open_table(folder.read(name)).read()
            if "source" in table.column_names:
                table = table.filter(pyarrow.compute.field("source") == source)
            ids, loss, top1 = (table[column].to_numpy() for column in ("id", "loss", "top1"))
        yield ids, loss, top1
