"""A view: the samples to take from a split of a shard set, in one Parquet file that any program can write.

Its columns are `id` and, where wanted, `label`, `weight` and `split`. The footer holds a ViewHead as JSON under
`shardset.view`. docs/views.md explains both.
"""

import hashlib
import io
import posixpath
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardset.errors import ConfigError, ManifestError
from shardset.format.naming import is_split
from shardset.order.selection import Selection
from shardset.prepared import prepared
from shardset.storage.base import Storage
from shardset.storage.checked import read_again
from shardset.storage.open import is_absolute, is_address

FOOTER: Final = b"shardset.view"

STORED: Final = np.iinfo(np.int64).min
"""In `labels`, that a sample keeps its stored label."""

_ROWS_AT_ONCE = 1 << 17

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@prepared
class ViewHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a view is of: a set, by an absolute address or one relative to the view's folder, and one of its splits.

    `digest` is that of the view (see `ViewTable.digest`); "" leaves it unchecked.
    """

    parent: str
    parent_digest: str
    split: str
    reason: str = ""
    digest: str = ""


@dataclass(frozen=True, eq=False)
class ViewSplit:
    """One split of a view: its samples, and their labels and weights by number; None where it changes none."""

    selection: Selection
    labels: Ints | None
    weights: Floats | None

    def labels_of(self, ids: Ints, stored: Ints) -> Ints:
        """The labels of samples of the view whose stored labels are given."""
        if self.labels is None:
            return stored
        labels = self.labels[self.selection.num_before(ids)]
        return np.where(labels == STORED, stored, labels)

    def weights_of(self, ids: Ints) -> Floats | float:
        """The weights of samples of the view."""
        return 1.0 if self.weights is None else self.weights[self.selection.num_before(ids)]


@dataclass(frozen=True, eq=False, kw_only=True)
class ViewTable:
    """The rows of a view, by ascending id: `names` are its splits and `codes` that of each row, None for one split."""

    ids: Ints
    labels: Ints | None = None
    weights: Floats | None = None
    names: tuple[str, ...] = ()
    codes: NDArray[np.int32] | None = None

    def __getitem__(self, rows: NDArray[Any]) -> "ViewTable":
        """Some of the rows, by number or mask; without the splits of which none is left."""
        labels, weights = (None if column is None else column[rows] for column in (self.labels, self.weights))
        if self.codes is None:
            return ViewTable(ids=self.ids[rows], labels=labels, weights=weights)
        used, codes = np.unique(self.codes[rows], return_inverse=True)
        names = tuple(self.names[code] for code in used.tolist())
        return ViewTable(ids=self.ids[rows], labels=labels, weights=weights, names=names, codes=codes.astype(np.int32))

    def digest(self, parent_digest: str, split: str) -> str:
        """SHA-256 over the set, its split, and each column's name and little-endian values."""
        found = hashlib.sha256(f"{parent_digest}\n{split}\n{' '.join(self.names)}\n".encode())
        columns = ("id", self.ids, "<i8"), ("label", self.labels, "<i8"), ("weight", self.weights, "<f4")
        for name, column, kind in (*columns, ("split", self.codes, "<i4")):
            if column is not None:
                found.update(name.encode())
                found.update(np.ascontiguousarray(column, kind).data)
        return found.hexdigest()

    def parts(self, head: ViewHead, num_ids: int, num_classes: int) -> dict[str, ViewSplit]:
        """The splits of the view; raises ConfigError for ids or labels that the set does not have."""
        labels = np.zeros(0) if self.labels is None else self.labels[self.labels != STORED]
        if len(labels) and not -1 <= labels.min() <= labels.max() < num_classes:
            raise ConfigError(
                f"labels reach {labels.min()} to {labels.max()}, the set has the classes 0 to {num_classes - 1}; give "
                "those, -1 for none, or null for the stored one"
            )
        splits = (
            {head.split: self}
            if self.codes is None
            else {name: self[self.codes == code] for code, name in enumerate(self.names)}
        )
        return {
            name: ViewSplit(Selection.of(rows.ids, num_ids, head.digest), rows.labels, rows.weights)
            for name, rows in splits.items()
        }


def read_view(storage: Storage, name: str) -> tuple[ViewHead | None, ViewTable]:
    """The head, None without one, and the rows of a stored view; raises ManifestError for what is no view."""
    where = f"{storage.url}/{name}"
    return read_again(lambda: parse_view(storage.read(name), where), ManifestError)


def parse_view(data: bytes, where: str) -> tuple[ViewHead | None, ViewTable]:
    """The head and the rows of a view from its bytes; `where` begins each ManifestError."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        text = (file.metadata.metadata or {}).get(FOOTER)
        head = None if text is None else msgspec.json.decode(text, type=ViewHead)
        table = _sorted_rows(file)
    except (pa.ArrowException, OSError, ValueError, LookupError, msgspec.MsgspecError) as error:
        what = " ".join(str(error).split())
        raise ManifestError(f"{where}: not a view ({what:.200}); docs/views.md says what its columns are") from error
    if head is not None and head.digest not in ("", table.digest(head.parent_digest, head.split)):
        raise ManifestError(f"{where}: its rows do not fit the digest in its footer; make the view again")
    return head, table


def view_to_bytes(head: ViewHead, table: ViewTable) -> bytes:
    """The Parquet file of a view."""
    import pyarrow as pa
    from pyarrow import parquet

    columns: dict[str, Any] = {"id": table.ids, "label": table.labels, "weight": table.weights}
    arrays = {name: pa.array(column) for name, column in columns.items() if column is not None}
    if table.labels is not None:
        arrays["label"] = pa.array(table.labels, mask=table.labels == STORED)
    if table.codes is not None:
        arrays["split"] = pa.DictionaryArray.from_arrays(table.codes, list(table.names))
    rows = pa.table(arrays).replace_schema_metadata({FOOTER: msgspec.json.encode(head)})
    out = io.BytesIO()
    parquet.write_table(
        rows, out, row_group_size=_ROWS_AT_ONCE, compression="zstd", write_page_checksum=True,
        use_dictionary=["split"], column_encoding={"id": "DELTA_BINARY_PACKED"},
    )  # fmt: skip
    return out.getvalue()


def address_from(folder: str, parent: str) -> str:
    """The address of a set, from the folder of its view and the parent that the view names."""
    if is_absolute(parent):
        return parent
    scheme, separator, path = folder.rpartition("://")
    return f"{scheme}{separator}{posixpath.normpath(posixpath.join(path, parent))}"


def relative_parent(folder: str, parent: str) -> str:
    """The parent that a view in `folder` names: relative to it, but for a set in another bucket."""
    is_near = not (is_address(folder) or is_address(parent)) or folder.split("/")[:3] == parent.split("/")[:3]
    return posixpath.relpath(parent, folder) if is_near else parent


def _sorted_rows(file: Any) -> ViewTable:
    """The rows of an open file; raises ValueError where a column is none of a view."""
    ids, labels = _column(file, "id", np.int64, None), _column(file, "label", np.int64, STORED)
    weights = _column(file, "weight", np.float32, 1)
    if ids is None or not len(ids):
        raise ValueError("it has no ids")
    if weights is not None and not ((weights > 0) & np.isfinite(weights)).all():
        raise ValueError("a weight is not above 0; leave out the samples that shall not count")
    names, codes = (), None
    if "split" in file.schema_arrow.names:
        column = file.read(columns=["split"]).column(0).dictionary_encode().combine_chunks()
        used = column.dictionary.to_pylist() if column.null_count == 0 else [None]
        if not all(isinstance(name, str) and is_split(name) for name in used):
            raise ValueError(f"{used} can't name its splits")
        names = tuple(sorted(used))
        codes = np.array([names.index(name) for name in used], np.int32)[column.indices.to_numpy()]
    table = ViewTable(ids=ids, labels=labels, weights=weights, names=names, codes=codes)
    if (ids[1:] > ids[:-1]).all():
        return table
    table = table[np.argsort(ids, kind="stable")]
    if (again := table.ids[1:][np.diff(table.ids) == 0]).size:
        raise ValueError(f"it lists id {again[0]} twice")
    return table


def _column(file: Any, name: str, kind: type, missing: Any) -> Any:
    """A column as an array, None if there is none; `missing` stands for null, None refuses it."""
    import pyarrow as pa

    if name not in file.schema_arrow.names:
        return None
    values, start = np.empty(file.metadata.num_rows, kind), 0
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[name], use_threads=False):
        column = batch.column(0).cast(pa.from_numpy_dtype(kind))
        if column.null_count:
            if missing is None:
                raise ValueError(f"{name} is null in a row")
            column = column.fill_null(missing)
        values[start : start + len(column)] = column.to_numpy(zero_copy_only=False)
        start += len(column)
    return values
