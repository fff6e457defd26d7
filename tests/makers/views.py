"""Views for tests: a small set in memory, and Parquet files as any program writes them."""

import io
import json
import uuid

import pyarrow as pa
from pyarrow import parquet

from shardset.format.manifest import LoadedSet, load
from shardset.storage.open import open_file
from tests.makers.shardset import new_set, png_samples, put

NUM_TRAIN, NUM_TEST = 60, 20


def small_set(folder: str | None = None) -> tuple[str, LoadedSet]:
    """The address of a set with train and test, and the set; in memory unless `folder` is given."""
    sizes = {"train": NUM_TRAIN, "test": NUM_TEST}
    samples = {name: png_samples(name, number, size=16) for name, number in sizes.items()}
    url = new_set(samples, folder and f"{folder}/set", num_shards=4)
    return url, load(url)


def put_view(
    url: str, loaded: LoadedSet, *, head: dict[str, object] | None = None, **columns
) -> str:
    """Writes a view with these columns beside a set, as a program without shardset would; returns
    its address.
    """
    footer = {"parent": "set", "parent_digest": loaded.manifest.digest, "split": "train"} | (
        head or {}
    )
    out = io.BytesIO()
    table = pa.table(columns).replace_schema_metadata({"shardset.view": json.dumps(footer)})
    parquet.write_table(table, out)
    address = f"{url.rpartition('/')[0]}/{uuid.uuid4().hex[:8]}.parquet"
    put(*open_file(address), out.getvalue())
    return address
