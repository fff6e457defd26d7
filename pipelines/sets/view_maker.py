"""`shardset view`: chooses samples of a split and writes them down as a view; copies no
sample.
"""

import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pipelines.sets.keys import read_keys, refuse_unknown
from shardset.errors import ConfigError, PreconditionFailed, brought_by
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, View
from shardset.format.naming import COLUMNS_FOLDER, is_split
from shardset.format.view import ViewHead, ViewRows, read_view, relative_parent, view_to_bytes
from shardset.order.permutation import derive_key, hash64
from shardset.settings import Count, setting
from shardset.storage.base import ABSENT
from shardset.storage.open import open_file

_SQL_NAMES = re.compile(r'"([a-z0-9_-]+)"|([a-z0-9_]+)', re.ASCII)
"""What may name a column of a set in SQL."""

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
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(
            f"{name} {value}" for name, value in given.items() if value and name != "from_split"
        )


def make_view(url: str, parent_url: str, choice: Choice) -> View:
    """Writes the chosen samples of a set, or of a view, as the view at `url`; returns it.

    Raises ConfigError for a choice that names what is not there, or no sample.
    """
    if not url.endswith(".parquet"):
        raise ConfigError(f"{url}: a view is a Parquet file; call it {url.rstrip('/')}.parquet")
    if not choice.words:
        raise ConfigError(
            "nothing is chosen; give --where, --ids, --keys, --drop-keys, --split or another choice"
        )
    loaded, (storage, name) = manifests.load(parent_url), open_file(url)
    names = list(loaded.manifest.splits)
    from_split = choice.from_split or (names[0] if len(names) == 1 else "train")
    whole, split = loaded.without_view(), loaded.stored_split(from_split)
    splits = _chosen(whole, split, loaded.part(from_split).rows, choice)
    if not all(len(part.ids) for part in splits.values()):
        raise ConfigError(f"no sample of {parent_url} {split} is left by: {choice.words}")
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
    if (
        choice.where
        or choice.keys
        or choice.drop_keys
        or choice.drop_duplicates
        or choice.per_class
    ):
        rows = _by_sample(whole, split, rows, choice)
    return _divided(rows, choice.split) if choice.split else {split: rows}


def _by_sample(whole: LoadedSet, split: str, rows: ViewRows, choice: Choice) -> ViewRows:
    """The rows that the choices by what is known of samples leave."""
    import pyarrow as pa
    from pyarrow import compute

    from pipelines.report.catalog import rows_by  # late, with Arrow
    from pipelines.sets.samples_table import samples_table

    if choice.where is None:
        samples = samples_table(whole, split, facts=("key", "image_crc32c"))
    else:
        words = {quoted or word for quoted, word in _SQL_NAMES.findall(choice.where.lower())}
        samples = samples_table(whole, split, words)
        rows = rows.at(np.isin(rows.ids, _ids_where(samples, choice.where)))
    for path, is_kept in ((choice.keys, True), (choice.drop_keys, False)):
        if path is not None:
            wanted = pa.array(read_keys(path), pa.string())
            unknown = wanted.filter(compute.invert(compute.is_in(wanted, samples["key"])))
            refuse_unknown(unknown.to_pylist(), f"split {split!r} of {whole.storage.url}")
            is_listed = compute.is_in(samples["key"], wanted).to_numpy()
            rows = rows.at(is_listed[rows.ids] == is_kept)
    if choice.drop_duplicates:
        images = samples.take(rows.ids).filter(compute.field("bytes") > 0)
        firsts = images.group_by(["image_crc32c", "bytes"]).aggregate([("id", "min")])["id_min"]
        rows = rows.at(~np.isin(rows.ids, np.setdiff1d(images["id"], firsts)))
    if choice.per_class is not None:
        columns = {
            "row": np.arange(len(rows.ids)),
            "label": samples["label"].take(rows.ids) if rows.labels is None else rows.labels,
            "random": hash64(derive_key(0, "view", "per class"), rows.ids),
        }
        by_class = rows_by("label", pa.table(columns)).values()
        taken = [row for of_class in by_class for row in of_class[: choice.per_class]]
        rows = rows.at(np.array(sorted(taken), np.int64))
    return rows


def _ids_where(samples: Any, where: str) -> np.ndarray:
    """The ids of the samples for whose rows an SQL expression holds."""
    with brought_by("sql"):
        import duckdb

    # A filter is one expression, and without external access it reads no file.
    with duckdb.connect(
        config={"enable_external_access": "false", "lock_configuration": "true"}
    ) as database:
        try:
            ids: np.ndarray = (
                database.from_arrow(samples).filter(where).select("id").fetchnumpy()["id"]
            )
        except duckdb.Error as error:
            raise ConfigError(
                f"--where {where}: {' '.join(str(error).split())}; columns are"
                f" {', '.join(dict.fromkeys((*samples.column_names, 'json')))}, and those in"
                f" {COLUMNS_FOLDER}"
            ) from error
    return ids


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
