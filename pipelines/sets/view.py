"""`shardset view`: chooses samples of a split and writes them down as a view; copies no
sample.
"""

import sys
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

from pipelines.sets.keys import read_keys, refuse_unknown
from shardset.errors import ConfigError, DamagedShard, PreconditionFailed, brought_by
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, View
from shardset.format.naming import is_split
from shardset.format.view import ViewHead, ViewRows, read_view, relative_parent, view_to_bytes
from shardset.order.permutation import derive_key, hash64
from shardset.settings import Count, setting
from shardset.storage.base import ABSENT
from shardset.storage.open import open_file

_FILE: dict[str, Any] = {"metavar": "FILE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which samples of a split a view takes.

    Each choice leaves out what it does not name; they apply in this order.
    """

    from_split: str | None = setting(
        None, "the split to choose from (default: train, or the only one)"
    )
    ids: str | None = setting(None, "a Parquet file with id, maybe label, weight, split", **_FILE)
    where: str | None = setting(
        None, "the samples whose rows match this SQL, as `width > 200`", metavar="SQL"
    )
    keys: str | None = setting(None, "the keys in a text file, one per line", **_FILE)
    drop_keys: str | None = setting(None, "all but the keys in a text file", **_FILE)
    drop_duplicates: bool = setting(False, "of samples with the same image, the first")
    per_class: Count | None = setting(
        None, "at most N samples of each class, at random", metavar="N"
    )
    split: dict[str, float] = setting(
        {},
        "splits of the view and their shares, at random, as train=0.9,val=0.1",
        metavar="SPLIT=SHARE,...",
    )

    @property
    def words(self) -> str:
        """The flags that choose."""
        given = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name != "from_split"
        }
        return ", ".join(f"{name} {value}" for name, value in given.items() if value)


def make_view(url: str, of: str, choice: Choice) -> View:
    """Writes the chosen samples of a set, or of a view, as the view at `url`; returns it.

    Raises ConfigError for a choice that names what is not there, or no sample.
    """
    if not url.endswith(".parquet"):
        raise ConfigError(f"{url}: a view is a Parquet file; call it {url.rstrip('/')}.parquet")
    if not choice.words:
        raise ConfigError(
            "nothing is chosen; give --where, --ids, --keys, --drop-keys, --split or another choice"
        )
    loaded, (storage, name) = manifests.load(of), open_file(url)
    names = list(loaded.manifest.splits)
    from_split = choice.from_split or (names[0] if len(names) == 1 else "train")
    whole, split = loaded.without_view(), loaded.stored_split(from_split)
    splits = _chosen(whole, split, loaded.part(from_split).rows, choice)
    if not all(len(part.ids) for part in splits.values()):
        raise ConfigError(f"no sample of {of} {split} is left by: {choice.words}")
    parent = relative_parent(storage.url, whole.storage.url)
    head = ViewHead(parent=parent, parent_digest=whole.digest, split=split, reason=choice.words)
    view = manifests.with_view(whole, head, splits, url).view
    assert view is not None, "of the same set"
    try:
        storage.write(name, view_to_bytes(view.head, splits), if_generation=ABSENT)
    except PreconditionFailed as error:
        raise ConfigError(
            f"{url}: a file of this name is there, and a view replaces none; choose another name"
        ) from error
    return view


def _chosen(whole: LoadedSet, split: str, rows: ViewRows, choice: Choice) -> dict[str, ViewRows]:
    """The rows that a choice leaves, by split."""
    if choice.ids is not None:
        given = {name or split: part for name, part in read_view(*open_file(choice.ids))[1].items()}
        ids = np.concatenate([part.ids for part in given.values()])
        if len(unknown := np.setdiff1d(ids, rows.ids)):
            raise ConfigError(
                f"{choice.ids}: {len(unknown):,} of its ids are not in the split, such as"
                f" {unknown[0]}"
            )
        if [*given] != [split] or given[split].has_more:
            if choice.words != f"ids {choice.ids}" or rows.has_more:
                raise ConfigError(
                    f"{choice.ids}: has labels, weights or splits; make it a view, then choose from"
                    " that"
                )
            return given
        rows = rows.at(np.isin(rows.ids, ids))
    if choice.where is not None:
        rows = rows.at(np.isin(rows.ids, _ids_where(whole, split, choice.where)))
    if choice.keys or choice.drop_keys or choice.drop_duplicates or choice.per_class:
        rows = _by_index(whole, split, rows, choice)
    return _divided(rows, choice.split) if choice.split else {split: rows}


def _by_index(whole: LoadedSet, split: str, rows: ViewRows, choice: Choice) -> ViewRows:
    """The rows that the choices by key, image and class leave."""
    from pipelines.report.alike import equal_images
    from pipelines.report.catalog import open_catalog, ranks  # late, with Arrow

    only = msgspec.structs.replace(whole.manifest, splits={split: whole.manifest.split(split)})
    catalog, problems = open_catalog(LoadedSet(only, whole.storage), max_samples=sys.maxsize)
    if problems:
        raise DamagedShard(f"{problems[0].where}: {problems[0].sentence}")
    keys, stored = np.concatenate(catalog.keys), catalog.rows  # of all ids, in order
    for path, is_kept in ((choice.keys, True), (choice.drop_keys, False)):
        if path is not None:
            wanted = np.array([key.encode() for key in read_keys(path)], np.bytes_)
            unknown = np.setdiff1d(wanted, keys).tolist()
            where = f"split {split!r} of {whole.storage.url}"
            refuse_unknown([key.decode("ascii", "replace") for key in unknown], where)
            rows = rows.at(np.isin(keys[rows.ids], wanted) == is_kept)
    if choice.drop_duplicates:
        groups = equal_images(stored, rows.ids[stored["image_bytes"][rows.ids] > 0])
        rows = rows.at(
            ~np.isin(rows.ids, [id_ for group in groups for id_ in sorted(group.samples)[1:]])
        )
    if choice.per_class is not None:
        labels = stored["label"][rows.ids] if rows.labels is None else rows.labels
        order = np.lexsort((hash64(derive_key(0, "view", "per class"), rows.ids), labels))
        rows = rows.at(np.sort(order[ranks(labels[order]) < choice.per_class]))
    return rows


def _ids_where(whole: LoadedSet, split: str, where: str) -> np.ndarray:
    """The ids of the samples for whose rows an SQL expression holds."""
    with brought_by("sql"):
        import duckdb

    from pipelines.sets.table import samples_table  # late, with Arrow

    samples = samples_table(whole, split, with_json="json" in where.lower())
    # A filter is one expression, and without external access it reads no file.
    with duckdb.connect(
        config={"enable_external_access": "false", "lock_configuration": "true"}
    ) as database:
        try:
            found: np.ndarray = (
                database.from_arrow(samples).filter(where).select("id").fetchnumpy()["id"]
            )
        except duckdb.Error as error:
            raise ConfigError(
                f"--where {where}: {' '.join(str(error).split())}; columns are"
                f" {', '.join(dict.fromkeys((*samples.column_names, 'json')))}"
            ) from error
    return found


def _divided(rows: ViewRows, shares: dict[str, float]) -> dict[str, ViewRows]:
    """The rows in splits, each with its share of them to one sample; the rest is left out."""
    if (
        not all(map(is_split, shares))
        or min(shares.values()) <= 0
        or sum(shares.values()) > 1 + 1e-9
    ):
        raise ConfigError(
            f"--split {shares}: expected names of splits, and shares above 0 that add up to 1 at"
            " most"
        )
    order = np.argsort(hash64(derive_key(0, "view", "split"), rows.ids), kind="stable")
    ends = np.round(np.cumsum([shares[name] for name in sorted(shares)]) * len(order)).astype(int)
    # what is past the last end is left out
    parts = dict(zip(sorted(shares), np.split(order, ends), strict=False))
    if empty := [name for name, part in parts.items() if not len(part)]:
        raise ConfigError(f"--split {shares}: no sample of {len(order):,} is left for {empty[0]}")
    return {name: rows.at(np.sort(part)) for name, part in parts.items()}
