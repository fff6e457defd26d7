"""A view: the samples to take from a split of a shard set, in one Parquet file that any program can
write.

Its columns are `id` and, where wanted, `label`, `weight` and `split`. The footer holds a ViewHead
as JSON under `shardset.view`. docs/how-to/select.md explains both.
"""

import hashlib
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardset.errors import DOCS, ManifestError
from shardset.format.naming import is_split
from shardset.order.selection import Selection
from shardset.prepared import prepared
from shardset.storage.base import Storage
from shardset.storage.checked import read_small
from shardset.storage.open import is_absolute, is_address

FOOTER: Final = b"shardset.view"

_ROWS_AT_ONCE = 1 << 17

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@prepared
class ViewHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parent of a view: a set, by an absolute address or one relative to the view's folder, and
    one of its splits.

    `digest` is the view's (see `view_digest`); "" leaves it unchecked.
    """

    parent: str
    parent_digest: str
    split: str
    reason: str = ""
    digest: str = ""


class ViewRows(NamedTuple):
    """Samples of a view by ascending id; `labels` and `weights` are None where it changes none."""

    ids: Ints
    labels: Ints | None = None
    weights: Floats | None = None

    @property
    def has_more(self) -> bool:
        """Whether there is more than ids."""
        return self.labels is not None or self.weights is not None

    def at(self, rows: NDArray[Any]) -> "ViewRows":
        """Some of the rows, by number or mask."""
        labels, weights = (None if column is None else column[rows] for column in self[1:])
        return ViewRows(self.ids[rows], labels, weights)


@dataclass(frozen=True, eq=False)
class ViewSplit:
    """One split of a view or set: its samples, and their labels and weights by number; None where
    none is changed.
    """

    selection: Selection
    labels: Ints | None = None
    weights: Floats | None = None

    @property
    def rows(self) -> ViewRows:
        """Its rows."""
        return ViewRows(
            self.selection.id_of(np.arange(self.selection.num_kept)), self.labels, self.weights
        )

    def labels_of(self, ids: Ints, stored: Ints) -> Ints:
        """The labels of samples of the split whose stored labels are given."""
        return stored if self.labels is None else self.labels[self.selection.num_before(ids)]

    def weights_of(self, ids: Ints) -> Floats | float:
        """The weights of samples of the split."""
        return 1.0 if self.weights is None else self.weights[self.selection.num_before(ids)]


def view_digest(parent_digest: str, splits: Mapping[str, ViewRows]) -> str:
    """SHA-256 over the set, then by name each split with the little-endian values of
    its columns.
    """
    found = hashlib.sha256(parent_digest.encode())
    for name, rows in sorted(splits.items()):
        found.update(f"\n{name}\n".encode())
        for column, kind in zip(rows, ("<i8", "<i8", "<f4"), strict=True):
            found.update(b"" if column is None else np.ascontiguousarray(column, kind).data)
    return found.hexdigest()


def read_view(storage: Storage, name: str) -> tuple[ViewHead | None, dict[str, ViewRows]]:
    """The head, None without one, and the rows of each split of a stored view; ManifestError for
    anything that isn't a view.

    Without a column `split`, all rows are of the split that the head names, "" without a head.
    """
    return parse_view(read_small(storage, name), f"{storage.url}/{name}")


def parse_view(data: bytes, where: str) -> tuple[ViewHead | None, dict[str, ViewRows]]:
    """`read_view` of the bytes of a file; `where` begins each ManifestError."""
    from shardset.format.parquet import open_table, parquet_errors

    def fail(reason: str) -> ManifestError:
        return ManifestError(
            f"{where}: not a view ({reason}); {DOCS}/how-to/select.md says what its columns are"
        )

    with parquet_errors(fail):
        file = open_table(data)
        text = (file.metadata.metadata or {}).get(FOOTER)
        head = None if text is None else msgspec.json.decode(text, type=ViewHead)
        splits = _rows_by_split(file, "" if head is None else head.split)
    if head is not None and head.digest not in ("", view_digest(head.parent_digest, splits)):
        raise ManifestError(
            f"{where}: its rows do not fit the digest in its footer; make the view again"
        )
    return head, splits


def view_to_bytes(head: ViewHead, splits: Mapping[str, ViewRows]) -> bytes:
    """The Parquet file of a view."""
    import pyarrow as pa

    from shardset.format.parquet import table_to_bytes

    arrays: dict[str, Any] = {}
    for name, columns in zip(
        ("id", "label", "weight"), zip(*splits.values(), strict=True), strict=True
    ):
        if columns[0] is not None:
            arrays[name] = np.concatenate(columns)
    if [*splits] != [head.split]:
        codes = np.repeat(
            np.arange(len(splits), dtype=np.int32), [len(rows.ids) for rows in splits.values()]
        )
        arrays["split"] = pa.DictionaryArray.from_arrays(codes, [*splits])
    return table_to_bytes(
        pa.table(arrays).replace_schema_metadata({FOOTER: msgspec.json.encode(head)}),
        row_group_size=_ROWS_AT_ONCE,
        use_dictionary=["split"],
        column_encoding={"id": "DELTA_BINARY_PACKED"},
    )


def address_from(folder: str, parent: str) -> str:
    """The address of a set, from the folder of its view and the parent that the view names."""
    if is_absolute(parent):
        return parent
    scheme, separator, path = folder.rpartition("://")
    return f"{scheme}{separator}{posixpath.normpath(posixpath.join(path, parent))}"


def relative_parent(folder: str, parent: str) -> str:
    """The parent that a view in `folder` names: relative to it, but for a set in another bucket."""
    is_near = (
        not (is_address(folder) or is_address(parent))
        or folder.split("/")[:3] == parent.split("/")[:3]
    )
    return posixpath.relpath(parent, folder) if is_near else parent


def _rows_by_split(file: Any, split: str) -> dict[str, ViewRows]:
    """The rows of an open file; raises ValueError where a column is none of a view."""
    kinds = {"id": np.int64, "label": np.int64, "weight": np.float32}
    columns: list[str] = file.schema_arrow.names
    if repeated := [name for name in (*kinds, "split") if columns.count(name) > 1]:
        raise ValueError(f"it has several columns {repeated[0]}; leave one")
    ids, labels, weights = (_column(file, name, kind) for name, kind in kinds.items())
    if ids is None or not len(ids):
        raise ValueError("it has no ids")
    if weights is not None and not ((weights > 0) & np.isfinite(weights)).all():
        raise ValueError("a weight is not above 0; leave out the samples that shall not count")
    names, rows, codes = [split], ViewRows(ids, labels, weights), None
    if "split" in columns:
        column = (
            file.read(columns=["split"])
            .column(0)
            .cast("string")
            .dictionary_encode()
            .combine_chunks()
        )
        names, codes = column.dictionary.to_pylist(), np.asarray(column.indices.fill_null(-1))
        if column.null_count or not all(map(is_split, names)):
            raise ValueError(f"{names} or null can't name its splits")
    if not (ids[1:] > ids[:-1]).all():
        order = np.argsort(ids, kind="stable")
        rows, codes = rows.at(order), None if codes is None else codes[order]
        if (again := rows.ids[1:][np.diff(rows.ids) == 0]).size:
            raise ValueError(f"it lists id {again[0]} twice")
    return {
        name: rows if codes is None else rows.at(codes == code) for code, name in enumerate(names)
    }


def _column(file: Any, name: str, kind: type) -> Any:
    """A column as an array, None if there is none.

    Read by the batch, because a view may be large.
    """
    if name not in file.schema_arrow.names:
        return None
    if file.schema_arrow.field(name).type == "bool":
        raise ValueError(f"{name} is true or false, expected numbers; a mask is not a list of ids")
    values, start = np.empty(file.metadata.num_rows, kind), 0
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[name], use_threads=False):
        column = batch.column(0).cast(np.dtype(kind).name)
        if column.null_count:
            raise ValueError(f"{name} is null in a row")
        # to_numpy imports pandas: 40 MB, 0.3 s
        values[start : start + len(column)] = np.from_dlpack(column)
        start += len(column)
    if start != len(values):
        raise ValueError(f"{name} has {start} of {len(values)} values")
    return values
