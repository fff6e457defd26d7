"""`python -m pipelines view`: chooses samples of a split and writes them down as a view; copies no sample."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from pipelines import arguments
from pipelines.arguments import Merge
from shardset.errors import ConfigError, DamagedShard, brought_by
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, View
from shardset.format.naming import is_split
from shardset.format.view import STORED, ViewHead, ViewTable, read_view, relative_parent, view_to_bytes
from shardset.order.permutation import derive_key, hash64
from shardset.settings import setting
from shardset.storage.base import ABSENT
from shardset.storage.open import open_file

_FILE: dict[str, Any] = {"metavar": "FILE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which samples of a split a view takes. Each choice leaves out what it does not name; they apply in this order."""

    from_split: str | None = setting(None, "the split to choose from (default: train, or the only one)")
    ids: str | None = setting(
        None, "a Parquet file with id, maybe label, weight, split; or a text, an id a line", **_FILE
    )
    where: str | None = setting(None, "what SQL says of a row of the catalogue, as `width > 200`", metavar="SQL")
    keys: str | None = setting(None, "a text with a key a line", **_FILE)
    drop_keys: str | None = setting(None, "all but the keys in a text", **_FILE)
    drop_duplicates: bool = setting(False, "of samples with the same image, the first")
    per_class: int | None = setting(
        None, "at most N samples of each class, at random", type=arguments.positive, metavar="N"
    )
    split: dict[str, float] = setting(
        {}, "splits of the view and their shares, at random, as train=0.9,val=0.1",
        action=Merge, type=arguments.fractions, metavar="SPLIT=SHARE,...",
    )  # fmt: skip
    seed: int = setting(0, "seed of what is at random")
    reason: str | None = setting(None, "why, as its footer will say (default: the flags)")

    @property
    def words(self) -> str:
        """The flags that choose."""
        names = ("ids", "where", "keys", "drop_keys", "drop_duplicates", "per_class", "split")
        return ", ".join(f"{name} {getattr(self, name)}" for name in names if getattr(self, name))


def make_view(url: str, of: str, choice: Choice) -> View:
    """Writes the chosen samples of a set, or of another view of it, as the view at `url`; returns it.

    Raises ConfigError for a choice that names what is not there, or no sample.
    """
    if not url.endswith(".parquet"):
        raise ConfigError(f"{url}: a view is a Parquet file; call it {url.rstrip('/')}.parquet")
    if not choice.words:
        raise ConfigError("nothing is chosen; give --where, --ids, --keys, --drop-keys, --split or another choice")
    loaded, (storage, name) = manifests.load(of), open_file(url)
    split, table = _all_rows(loaded, of, choice.from_split)
    whole = LoadedSet(loaded.whole, loaded.storage)
    chosen = _chosen(whole, split, table, choice)
    if not len(chosen.ids):
        raise ConfigError(f"no sample of {of} {split} is left by: {choice.words}")
    head = ViewHead(
        parent=relative_parent(storage.url, loaded.storage.url),
        parent_digest=whole.manifest.digest,
        split=split,
        reason=choice.words if choice.reason is None else choice.reason,
    )
    view = manifests.with_view(whole, head, chosen, url).view
    assert view is not None, "of the same set"
    with storage.writer(name, if_generation=ABSENT) as out:
        out.write(view_to_bytes(view.head, chosen))
    return view


def _all_rows(loaded: LoadedSet, url: str, wanted: str | None) -> tuple[str, ViewTable]:
    """The stored split to choose from, and its samples: all, or those of a view of it."""
    names = list(loaded.manifest.splits)
    if loaded.view is None:
        split = wanted or (names[0] if len(names) == 1 else "train")
        return split, ViewTable(ids=np.arange(loaded.manifest.split(split).num_samples))
    _, table = read_view(*open_file(url))
    if wanted is not None and wanted not in loaded.view.splits:
        raise ConfigError(f"the view {url} has no split {wanted!r}, only {', '.join(loaded.view.splits)}")
    if wanted is not None and table.codes is not None:
        table = replace(table[table.codes == table.names.index(wanted)], names=(), codes=None)
    return loaded.view.head.split, table


def _chosen(whole: LoadedSet, split: str, table: ViewTable, choice: Choice) -> ViewTable:
    """The rows that a choice leaves, and their splits."""
    if choice.ids is not None:
        table = _with_ids(table, choice.ids)
    if choice.where is not None:
        table = table[np.isin(table.ids, _ids_where(whole, split, choice.where))]
    if choice.keys or choice.drop_keys or choice.drop_duplicates or choice.per_class:
        from pipelines.report.catalog import open_catalog  # late, with Arrow

        stored = msgspec.structs.replace(whole.manifest, splits={split: whole.manifest.split(split)})
        catalog, problems = open_catalog(whole._replace(manifest=stored), max_samples=sys.maxsize)
        if problems:
            raise DamagedShard(f"{problems[0].where}: {problems[0].sentence}")
        table = _by_index(np.concatenate(catalog.keys), catalog.rows, table, choice)
    if choice.split:
        table = _divided(table, choice)
    return table


def _by_index(keys: np.ndarray, stored: np.ndarray, table: ViewTable, choice: Choice) -> ViewTable:
    """The rows that the choices by key, image and class leave; `keys` and `stored` are of all ids, in order."""
    for path, is_kept in ((choice.keys, True), (choice.drop_keys, False)):
        if path is not None:
            wanted = np.array([line.encode("ascii", "replace") for line in _lines(path)], np.bytes_)
            if len(unknown := np.setdiff1d(wanted, keys)):
                some = ", ".join(key.decode() for key in unknown[:3].tolist())
                raise ConfigError(f"{path}: {len(unknown):,} of its keys are not in the split, such as {some}")
            table = table[np.isin(keys[table.ids], wanted) == is_kept]
    rows = stored[table.ids]
    if choice.drop_duplicates:
        content = np.stack([rows["image_crc32c"].astype(np.int64), rows["image_bytes"]])
        content[1, rows["image_bytes"] == 0] = -1 - np.flatnonzero(rows["image_bytes"] == 0)  # no image is no copy
        first = np.sort(np.unique(content, axis=1, return_index=True)[1])
        table, rows = table[first], rows[first]
    if choice.per_class is not None:
        labels = rows["label"]
        if table.labels is not None:
            labels = np.where(table.labels == STORED, labels, table.labels)
        by_class = np.lexsort((_random(table.ids, choice.seed, "per class"), labels))
        _, firsts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
        is_taken = np.arange(len(by_class)) - np.repeat(firsts, counts) < choice.per_class
        table = table[np.sort(by_class[is_taken])]
    return table


def _with_ids(table: ViewTable, path: str) -> ViewTable:
    """The rows with the ids of a file, and the labels, weights and splits that it gives."""
    if path.endswith(".parquet"):
        given = read_view(*open_file(path))[1]
    else:
        try:
            given = ViewTable(ids=np.unique(np.array(_lines(path), np.int64)))
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{path}: {error}; expected an id a line, or a Parquet file") from error
    if len(unknown := np.setdiff1d(given.ids, table.ids)):
        raise ConfigError(f"{path}: {len(unknown):,} of its ids are not in the split, such as {unknown[0]}")
    table = table[np.searchsorted(table.ids, given.ids)]
    return replace(
        table,
        labels=table.labels if given.labels is None else given.labels,
        weights=table.weights if given.weights is None else given.weights,
        names=given.names or table.names,
        codes=table.codes if given.codes is None else given.codes,
    )


def _ids_where(whole: LoadedSet, split: str, where: str) -> np.ndarray:
    """The ids of the catalogue's rows for which an SQL expression holds."""
    with brought_by("sql"):
        import duckdb

    from pipelines.catalog import read_catalog  # late, with Arrow

    catalog = read_catalog(whole, split)
    with duckdb.connect() as database:
        database.register("catalog", catalog)
        try:
            found: np.ndarray = database.execute(f"SELECT id FROM catalog WHERE ({where})").fetchnumpy()["id"]
        except duckdb.Error as error:
            raise ConfigError(f"--where {where}: {error}; columns are {', '.join(catalog.column_names)}") from error
    return found


def _divided(table: ViewTable, choice: Choice) -> ViewTable:
    """The rows with splits, each with its share of them to one sample; the rest is left out."""
    names, ends = tuple(sorted(choice.split)), np.cumsum([choice.split[name] for name in sorted(choice.split)])
    if not all(map(is_split, names)) or min(choice.split.values()) <= 0 or ends[-1] > 1 + 1e-9:
        raise ConfigError(
            f"--split {choice.split}: expected names of splits, and shares above 0 that add up to 1 at most"
        )
    rank = np.empty(len(table.ids), np.int64)
    rank[np.argsort(_random(table.ids, choice.seed, "split"), kind="stable")] = np.arange(len(rank))
    codes = np.searchsorted(np.round(ends * len(rank)), rank, side="right").astype(np.int32)
    divided = replace(table[codes < len(names)], names=names, codes=codes[codes < len(names)])
    if empty := [name for code, name in enumerate(names) if code not in codes]:
        raise ConfigError(f"--split {choice.split}: no sample of {len(table.ids):,} is left for {empty[0]}")
    return divided


def _random(ids: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    numbers: np.ndarray = hash64(derive_key(seed, "view", purpose), ids)
    return numbers


def _lines(path: str) -> Sequence[str]:
    storage, name = open_file(path)
    return [line for line in storage.read(name).decode("utf-8", "replace").splitlines() if line]
