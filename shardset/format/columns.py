"""Columns of a shard set: one more value for each sample, in a set of its own below `columns/NAME/`.

Such a set has the shards of its parent: the same numbers, sizes and keys, so a sample has the same place in both. Its
manifest names the parent's digest. docs/columns.md describes it.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardset.errors import ConfigError, DamagedShard, ManifestError, SourceError
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, Split
from shardset.format.naming import is_field
from shardset.storage.base import Storage

SOURCE: Final = "column"
"""The `provenance.source` of the manifest of a column."""

COLUMNS: Final = "columns/"
"""The folder of all columns, in that of their set."""

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(<[fiu][248]|\|[iub]1)', 'fortran_order': False, 'shape': \(([0-9, ]*)\), \} *\n",
    re.DOTALL,
)


@dataclass(frozen=True)
class StoredColumn:
    """A column of a split. Its values are bytes, or `.npy` files that begin with `header` if that is not empty."""

    name: str
    storage: Storage
    split: Split
    header: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def empty(self, num_rows: int) -> NDArray[Any] | list[bytes | None]:
        """Room for some values: an array of NaN (0 where the dtype has none), or a list of None."""
        return np.full((num_rows, *self.shape), self._fill, self.dtype) if self.header else [None] * num_rows

    def value(self, content: bytes | None) -> Any:
        """The value that a member holds; b"", which says that there is none, is b"" or NaN. Raises DamagedShard."""
        if not self.header:
            return content
        if not content:
            return self._fill
        if not content.startswith(self.header) or len(content) != self._num_bytes:
            raise DamagedShard(
                f"{self.storage.url}: a value is no array of {self.dtype} {self.shape}; write the column again"
            )
        return np.frombuffer(content, self.dtype, offset=len(self.header)).reshape(self.shape)

    @cached_property
    def _num_bytes(self) -> int:
        return len(self.header) + self.dtype.itemsize * math.prod(self.shape)

    @cached_property
    def _fill(self) -> float:
        return np.nan if self.dtype.kind == "f" else 0


def array_kind(content: bytes, where: str) -> tuple[bytes, np.dtype[Any], tuple[int, ...]]:
    """The header, the dtype and the shape of a `.npy` file; raises SourceError unless it is one of plain numbers."""
    # NumPy would parse the header as Python, which fails now and then where other threads do the same.
    found = _HEADER.match(content)
    if found is None:
        raise SourceError(
            f"{where}: not a NumPy file of version 1.0 with numbers of 1 to 8 bytes, little-endian, in C order: it "
            f"begins with {content[:80]!r}; save it again by numpy.save(..., np.ascontiguousarray(...))"
        )
    return found[0], np.dtype(found[1].decode()), tuple(int(size) for size in found[2].split(b",") if size.strip())


def column_url(parent: Storage, name: str) -> str:
    """The folder of a column; raises ConfigError unless that can be its name."""
    if not is_field(name):
        raise ConfigError(f"column {name!r}: expected a name of a-z, 0-9, _ and -")
    return f"{parent.url}/{COLUMNS}{name}"


def open_column(parent: LoadedSet, split: str, name: str) -> StoredColumn:
    """A column of a split; raises ManifestError if it is missing or was written for another set."""
    manifest, storage = manifests.load(column_url(parent.storage, name))
    made, digest = manifest.provenance, parent.manifest.digest
    if made.source != SOURCE or made.source_digest != digest:
        raise ManifestError(
            f"{storage.url}: a column of set {made.source_digest[:12]}…, this one is {digest[:12]}…; "
            "write it again with `python -m pipelines column`"
        )
    stored = manifest.split(split)
    if stored.shard_sizes != parent.manifest.split(split).shard_sizes or len(stored.fields) != 1:
        raise ManifestError(f"{storage.url}: split {split!r} has other shards than its set; write the column again")
    header = made.options.get("header")
    kind = array_kind(str(header).encode("latin-1", "replace"), storage.url) if header else (b"", np.dtype("u1"), ())
    return StoredColumn(name, storage, stored, *kind)
