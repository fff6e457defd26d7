"""A view: the samples to take from a split of a shard set, in one Parquet file that any program can
write.

Its columns are `id` and, where wanted, `label`, `weight` and `split`. The footer holds a ViewHead
as JSON under `shardset.view`. docs/how-to/select.md explains both.
"""

import hashlib
import posixpath
from collections.abc import Mapping, Sequence
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
from shardset.storage.open import is_absolute, is_address

FOOTER: Final = b"shardset.view"

_KINDS: Final = {"id": "int64", "label": "int64", "weight": "float32", "split": "string"}
"""The columns and their types."""

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
    digest = hashlib.sha256(parent_digest.encode())
    for name, rows in sorted(splits.items()):
        digest.update(f"\n{name}\n".encode())
        for column, kind in zip(rows, ("<i8", "<i8", "<f4"), strict=True):
            digest.update(b"" if column is None else np.ascontiguousarray(column, kind).data)
    return digest.hexdigest()


def read_view(storage: Storage, name: str) -> tuple[ViewHead | None, dict[str, ViewRows]]:
    """The head, None without one, and the rows of each split of a stored view; ManifestError for
    anything that isn't a view.

    Without a column `split`, all rows are of the split that the head names, "" without a head.
    """
    return parse_view(storage.read(name), f"{storage.url}/{name}")


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

    tables = []
    for name, rows in splits.items():
        names = pa.repeat(name, len(rows.ids)) if [*splits] != [head.split] else None
        columns = zip(_KINDS, (*rows, names), strict=True)
        tables.append(pa.table({kind: column for kind, column in columns if column is not None}))
    return table_to_bytes(
        pa.concat_tables(tables).replace_schema_metadata({FOOTER: msgspec.json.encode(head)}),
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
    names = [name for name in file.schema_arrow.names if name in _KINDS]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"it has several columns {repeated[0]}; leave one")
    rows, splits, codes = _rows(file, [name for name in names if name != "split"]), [split], None
    if "split" in names:
        column = file.read(columns=["split"]).column(0).cast("string")
        encoded = column.dictionary_encode().combine_chunks()
        splits, codes = encoded.dictionary.to_pylist(), np.asarray(encoded.indices.fill_null(-1))
        if column.null_count or not all(map(is_split, splits)):
            raise ValueError(f"{splits} or null can't name its splits")
    if not (rows.ids[1:] > rows.ids[:-1]).all():
        order = np.argsort(rows.ids, kind="stable")
        rows, codes = rows.at(order), None if codes is None else codes[order]
        if (again := rows.ids[1:][np.diff(rows.ids) == 0]).size:
            raise ValueError(f"it lists id {again[0]} twice")
    return {
        name: rows if codes is None else rows.at(codes == code) for code, name in enumerate(splits)
    }


def _rows(file: Any, names: Sequence[str]) -> ViewRows:
    """The ids, labels and weights, read by the batch, because a view may be large."""
    from shardset.format.parquet import as_numpy

    if "id" not in names or not file.metadata.num_rows:
        raise ValueError("it has no ids")
    arrays, start = {name: np.empty(file.metadata.num_rows, _KINDS[name]) for name in names}, 0
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names, use_threads=False):
        for name, array in arrays.items():
            column = batch[name]
            if column.null_count or column.type == "bool":
                raise ValueError(f"{name} is null, or true or false, in a row; expected numbers")
            array[start : start + len(batch)] = as_numpy(column.cast(_KINDS[name]))
        start += len(batch)
    if start != file.metadata.num_rows:
        raise ValueError(f"it has {start} of {file.metadata.num_rows} rows")
    weights = arrays.get("weight")
    if weights is not None and not ((weights > 0) & np.isfinite(weights)).all():
        raise ValueError("a weight is not above 0; leave out the samples that shall not count")
    return ViewRows(arrays["id"], arrays.get("label"), weights)
