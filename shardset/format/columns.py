"""Columns of a shard set: one more value for each sample, in a separate set below
`columns/NAME/`.

Such a set has the shards of its parent: the same numbers, sizes and keys, so a sample has the same
place in both. Its manifest names the parent's digest. docs/how-to/columns.md describes it.
"""

import io
import math
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardset.errors import ConfigError, DamagedShard, ManifestError
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, Split
from shardset.format.naming import COLUMNS_FOLDER, is_field
from shardset.storage.base import Storage

SOURCE: Final = "column"
"""The `provenance.source` of the manifest of a column."""

BATCH_NAMES: Final = frozenset(
    {"image", "label", "weight", "id", "flip", "key", "source", "matrix", "orig_size"}
)
"""Names that a batch has already, so no column; `source` is the number of the shard set in a
mixture.
"""

NUMBERS: Final = re.compile(r"<[fiu][248]|\|[iub]1")
"""The dtypes of arrays."""


@dataclass(frozen=True)
class StoredColumn:
    """A column of a split.

    Its values are bytes, or `.npy` files of arrays like `missing`, which stands for none.
    """

    name: str
    storage: Storage
    split: Split
    missing: NDArray[Any] | None
    header: bytes

    def empty(self, num_rows: int) -> NDArray[Any] | list[bytes | None]:
        """Room for some values."""
        return (
            [None] * num_rows
            if self.missing is None
            else np.repeat(self.missing[np.newaxis], num_rows, 0)
        )

    def value(self, content: bytes | None) -> Any:
        """The value that a member holds; b"" says that there is none. Raises DamagedShard."""
        if self.missing is None or not content:
            return content if self.missing is None else self.missing
        if (
            not content.startswith(self.header)
            or len(content) != len(self.header) + self.missing.nbytes
        ):
            raise DamagedShard(
                f"{self.storage.url}: a value is no array like others; write the column again"
            )
        return np.frombuffer(content, self.missing.dtype, offset=len(self.header)).reshape(
            self.missing.shape
        )


def npy(array: NDArray[Any]) -> bytes:
    """An array as a `.npy` file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def column_url(parent: Storage, name: str) -> str:
    """The folder of a column; raises ConfigError unless that can be its name."""
    if name in BATCH_NAMES:
        raise ConfigError(f"a batch already has a {name!r}; use another name for that column")
    if not is_field(name):
        raise ConfigError(f"column {name!r}: expected a name of a-z, 0-9, _ and -")
    return f"{parent.url}/{COLUMNS_FOLDER}{name}"


def open_column(parent: LoadedSet, split: str, name: str) -> StoredColumn:
    """A column of a split; raises ManifestError if it is missing or was written for another set."""
    loaded = manifests.load(column_url(parent.storage, name))
    manifest, storage = loaded.manifest, loaded.storage
    made, digest = manifest.provenance, parent.manifest.digest
    if made.source != SOURCE or made.source_digest != digest:
        raise ManifestError(
            f"{storage.url}: a column of set {made.source_digest[:12]}…, this one is"
            f" {digest[:12]}…; write it again with `shardset column`"
        )
    stored = manifest.split(parent.stored_split(split))
    sizes = parent.manifest.split(split).shard_sizes
    if stored.shard_sizes != sizes or len(stored.fields) != 1:
        raise ManifestError(
            f"{storage.url}: split {split!r} does not fit its set; write the column again"
        )
    dtype, shape = made.options.get("dtype"), made.options.get("shape", [])
    if not dtype:
        return StoredColumn(name, storage, stored, None, b"")
    if not NUMBERS.fullmatch(str(dtype)) or not _fits(dtype, shape, stored.num_content_bytes):
        raise ManifestError(
            f"{storage.url}: dtype {dtype!r} and shape {shape!r} don't fit its values;"
            " write the column again"
        )
    missing = np.full(shape, np.nan if "f" in dtype else 0, dtype)
    return StoredColumn(name, storage, stored, missing, npy(missing)[: -missing.nbytes or None])


def _fits(dtype: str, shape: Any, num_bytes: int) -> bool:
    """Whether an array of that dtype and shape can be among so many bytes."""
    is_list = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return is_list and math.prod(shape) * np.dtype(dtype).itemsize <= num_bytes
