"""Columns of a shard set: one more value for each sample, in a set of its own below `columns/NAME/`.

Such a set has the shards of its parent: the same numbers, sizes and keys, so a sample has the same place in both. Its
manifest names the parent's digest. docs/columns.md describes it.
"""

import io
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardset.errors import ConfigError, DamagedShard, ManifestError
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, Split
from shardset.storage.base import Storage

SOURCE: Final = "column"
"""The `provenance.source` of the manifest of a column."""

_DTYPE = re.compile(r"<[fiu][248]|\|[iub]1")
_NAME = re.compile(r"[a-z0-9_-]{1,12}", re.ASCII)


@dataclass(frozen=True)
class Column:
    """A column of a split. Its values are arrays of one dtype and shape, or bytes if `dtype` is None."""

    name: str
    storage: Storage
    split: Split
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]

    def empty(self, num_rows: int) -> NDArray[Any] | list[bytes | None]:
        """Room for some values: an array of NaN (0 where the dtype has none), or a list of None."""
        if self.dtype is None:
            return [None] * num_rows
        return np.full((num_rows, *self.shape), self._fill, self.dtype)

    def value(self, content: bytes | None) -> Any:
        """The value that a member holds; b"", which says that there is none, is b"" or NaN. Raises DamagedShard."""
        if self.dtype is None:
            return content
        if not content:
            return self._fill
        if not content.startswith(self._header) or len(content) != self._num_bytes:
            raise DamagedShard(f"{self.storage.url}: a value is no array of {self.dtype} {self.shape}; write it again")
        return np.frombuffer(content, self.dtype, offset=len(self._header)).reshape(self.shape)

    @cached_property
    def _header(self) -> bytes:
        assert self.dtype is not None
        return array_header(self.dtype, self.shape)

    @cached_property
    def _num_bytes(self) -> int:
        assert self.dtype is not None
        return len(self._header) + self.dtype.itemsize * int(np.prod(self.shape))

    @cached_property
    def _fill(self) -> float:
        return np.nan if self.dtype is not None and self.dtype.kind == "f" else 0


def array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The beginning of a `.npy` file of one value; its elements follow, in C order."""
    file = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def column_url(parent: Storage, name: str) -> str:
    """The folder of a column; raises ConfigError unless that can be its name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"column {name!r}: expected 1 to 12 of a-z, 0-9, _ and -")
    return f"{parent.url}/columns/{name}"


def open_column(parent: LoadedSet, split: str, name: str) -> Column:
    """A column of a split; raises ManifestError if it is missing or was written for another set."""
    manifest, storage = manifests.load(column_url(parent.storage, name))
    made = manifest.provenance
    if made.source != SOURCE or made.source_digest != parent.manifest.digest:
        raise ManifestError(
            f"{storage.url}: a column of set {made.source_digest[:12]}…, this one is {parent.manifest.digest[:12]}…; "
            "write it again with `python -m pipelines column`"
        )
    stored = manifest.split(split)
    if stored.shard_sizes != parent.manifest.split(split).shard_sizes or len(stored.fields) != 1:
        raise ManifestError(f"{storage.url}: split {split!r} has other shards than its set; write the column again")
    dtype, shape = made.options.get("dtype"), made.options.get("shape", [])
    is_shape = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not is_shape or (dtype is not None and not _DTYPE.fullmatch(str(dtype))):
        raise ManifestError(f"{storage.url}: arrays of {dtype!r} {shape!r} are not read; write the column again")
    return Column(name, storage, stored, None if dtype is None else np.dtype(dtype), tuple(shape))
