"""Views for tests: a small set in memory, and Parquet files as any program writes them."""

import io
import json
import uuid

import pyarrow as pa
from pyarrow import parquet

from shardset.format.manifest import LoadedSet, load
from shardset.storage.open import open_file, open_storage
from tests.makers.shardset import png_samples, put, write_shard_set

NUM_TRAIN, NUM_TEST = 60, 20


def small_set(folder: str | None = None) -> tuple[str, LoadedSet]:
    """The address of a set with train and test, and the set; in memory unless `folder` is given."""
    url = f"{folder or f'memory://{uuid.uuid4().hex}'}/set"
    samples = {
        "train": png_samples("train", NUM_TRAIN, size=16),
        "test": png_samples("test", NUM_TEST, size=16),
    }
    write_shard_set(open_storage(url), samples, num_shards=4)
    return url, load(url)


def put_view(
    url: str, loaded: LoadedSet, *, head: dict[str, object] | None = None, **columns: object
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
