"""Columns of a shard set: one more value for each sample, in a separate set below
`columns/NAME/`.

Such a set has a group of shards for each group of its parent: the same numbers, sizes and keys, so
a sample has the same place in both. The `plan_digest` of a group is the `tars_sha256` of the
parent's. An append adds groups to the parent; their samples have no value until the column is
written again. docs/how-to/columns.md describes it.
"""

import io
import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardset.errors import ConfigError, DamagedShard, ManifestError, MissingSet, ShardsetError
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, Provenance, Split
from shardset.format.naming import COLUMNS_FOLDER, MANIFEST, is_field
from shardset.format.shards import StoredShards
from shardset.storage.base import Storage
from shardset.storage.open import is_web, open_storage

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
    """A column of a split, with the groups that both have.

    Raises MissingSet if it is missing, ManifestError if it was written for other tars, or can't say
    which samples have no value.
    """
    try:
        loaded = manifests.load(column_url(parent.storage, name))
    except MissingSet as error:
        raise MissingSet(
            f"{parent.storage.url}: no column {name!r}; found"
            f" {', '.join(_names(parent.storage)) or 'none'}"
        ) from error
    url, whole = loaded.storage.url, parent.manifest.split(split)
    stored = loaded.manifest.split(stored_split := parent.stored_split(split))
    groups = stored.groups[: num_shared_groups(loaded, stored_split, whole)]
    covered = msgspec.structs.replace(
        stored,
        num_samples=sum(group.num_samples for group in groups),
        shards=StoredShards(groups, loaded.storage),
    )
    options = loaded.manifest.provenance.options
    dtype, shape = options.get("dtype"), options.get("shape", ())
    if not dtype:
        return StoredColumn(name, loaded.storage, covered, None, b"")
    try:
        kind = np.dtype((dtype, tuple(shape)))
        if not NUMBERS.fullmatch(dtype) or kind.itemsize > stored.num_content_bytes:
            raise ValueError("not of numbers, or larger than all of them")
    except (TypeError, ValueError) as error:
        raise ManifestError(
            f"{url}: dtype {dtype!r} and shape {shape!r} don't fit its values ({error});"
            " write the column again"
        ) from error
    num_lacking = whole.num_samples - covered.num_samples
    if num_lacking and kind.base.kind != "f":
        raise ManifestError(
            f"{url}: {num_lacking:,} samples of split {split!r} have no value, and {kind.base}"
            f" can't say NaN; give their values with `shardset column {parent.storage.url} {name}"
            " --from ...`"
        )
    missing = np.full(kind.shape, np.nan if kind.base.kind == "f" else 0, kind.base)
    header = npy(missing)[: -missing.nbytes or None]
    return StoredColumn(name, loaded.storage, covered, missing, header)


def num_shared_groups(column: LoadedSet, name: str, parent: Split) -> int:
    """How many groups of a split of the parent the column has, from the first on; an older version
    of the parent may have fewer than the column.

    Raises ManifestError for a set that is no column, or is one of other tars.
    """
    manifest, url = column.manifest, column.storage.url
    if manifest.provenance.source != SOURCE:
        raise ManifestError(f"{url}: not a column; use another name")
    groups = manifest.splits[name].groups if name in manifest.splits else []
    pairs = [*zip(groups, parent.groups, strict=False)]
    for group, origin in pairs:
        facts = group.plan_digest, group.num_shards, group.num_samples
        if facts != (origin.tars_sha256, origin.num_shards, origin.num_samples):
            raise ManifestError(
                f"{url}: was written for other tars of split {name!r} than the set has (`compact`"
                " writes some again); remove this folder and write the column again, or write it"
                " under another name"
            )
    return len(pairs)


def num_values_of(made: Provenance) -> int:
    """How many samples have a value in a column."""
    return sum(int(part.options.get("num_values", 0)) for part in (made, *made.appended))


def listed_columns(parent: LoadedSet) -> list[dict[str, Any]] | None:
    """What is known of each column of a complete set, as JSON; None on a web server, which lists
    none.

    `splits` has the samples that the column covers, `lacking` the tars of the others.
    """
    if is_web(parent.storage.url):
        return None
    return [_described(parent, name) for name in _names(parent.storage)]


def _names(storage: Storage) -> list[str]:
    """The names of the columns of a set; of one on a web server, which lists nothing, none."""
    if is_web(storage.url):
        return []
    paths = [stat.name.split("/") for stat in storage.list(COLUMNS_FOLDER)]
    return sorted(path[1] for path in paths if path[2:] == [MANIFEST])


def _described(parent: LoadedSet, name: str) -> dict[str, Any]:
    covered, lacking = dict[str, int](), list[str]()
    try:
        storage = open_storage(column_url(parent.storage, name))
        manifest = manifests.read_head(storage)
        for split, whole in parent.manifest.splits.items():
            shared = num_shared_groups(LoadedSet(manifest, storage), split, whole)
            covered[split] = sum(group.num_samples for group in whole.groups[:shared])
            lacking += [group.shards for group in whole.groups[shared:]]
    except ShardsetError as error:
        return {"name": name, "problem": str(error)}
    made = manifest.provenance
    return {
        "name": name,
        "version": manifest.number,
        "fields": next(iter(manifest.splits.values())).fields,
        "dtype": made.options.get("dtype"),
        "shape": made.options.get("shape"),
        "num_values": num_values_of(made),
        "splits": covered,
        "lacking": lacking,
    }
