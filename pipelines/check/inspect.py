"""Answers one question about a shard set: an overview, or the samples of a shard, of a key or of an
original name.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from pipelines import split_table
from pipelines.check.problems import read_quarantine
from shardset.errors import BadTarget, ConfigError
from shardset.format import manifest as manifests
from shardset.format.annotations import boxes_in
from shardset.format.columns import listed_columns
from shardset.format.manifest import LoadedSet, Manifest
from shardset.format.rows import fields_of, numbers
from shardset.format.write import class_counts
from shardset.program import did_you_mean, some_of
from shardset.read.query import samples_of
from shardset.storage.many import in_order

NO_NAME = "original names are not known: no build made these samples"
_OLDER = "older versions have it as long as they are left: `log SET` lists them, SET@N is one"
_SHARD_FIELDS = ("path", "num_samples", "num_bytes", "first_id")
MAX_COUNTED = 5_000
"""Boxes are counted in so many samples of a split, because each is a read of its own."""

_MAX_REASONS = 20
"""An error lists this many entries of the quarantine list."""


def inspect(
    url: str,
    *,
    split: str | None = None,
    shard: int | None = None,
    key: str | None = None,
    name: str | None = None,
    class_name: str | None = None,
) -> dict[str, Any] | list[dict[str, Any]]:
    """The answer from the set or view at `url`: samples, or an overview if none are asked for.

    At most one of `shard`, `key` and `name`; optionally only in one split or class (a name, a wnid
    or a label). Raises ConfigError if there is no such split, class, shard or sample.
    """
    loaded = manifests.load(url)
    if split is not None:
        loaded.manifest.split(split)
    label = None if class_name is None else find_label(loaded.manifest, class_name)
    tables: Iterable[pa.Table]
    if shard is not None:
        tables = _of_shard(loaded, split, shard)
    elif key is not None:
        tables = _of_key(loaded, split, key)
    elif name is not None:
        tables = _of_name(loaded, split, name)
    else:
        return overview(loaded, url, split=split, label=label)
    samples = [sample for rows in tables for sample in _facts_of(loaded.manifest, rows)]
    return [sample for sample in samples if label in (None, sample["label"])]


def counted(loaded: LoadedSet) -> Manifest:
    """The manifest, with the samples and classes that a view takes in the totals of its splits;
    reads the indexes.
    """
    splits = dict(loaded.manifest.splits)
    for name in loaded.view.splits if loaded.view else ():
        labels = numbers(pa.concat_tables(samples_of(loaded, name, ["label"])), "label")
        totals = class_counts(labels, len(loaded.manifest.classes)).tolist()
        splits[name] = msgspec.structs.replace(
            splits[name], num_samples=len(labels), class_totals=totals
        )
    return msgspec.structs.replace(loaded.manifest, splits=splits)


def count_boxes(loaded: LoadedSet, split: str) -> tuple[int, Counter[int]]:
    """The number of samples that were read, about MAX_COUNTED of a split, and their boxes by label.

    A sample whose annotations can't be read has none; `verify --deep` names it.
    """
    storage, stored = loaded.storage, loaded.manifest.split(split)
    boxes, num_read = Counter[int](), 0

    def read(sample: dict[str, Any]) -> bytes:
        if not sample.get("json.bytes"):
            return b"{}"
        start = sample["json.offset"]
        return storage.read(sample["shard"], start, start + sample["json.bytes"])

    some = range(stored.num_shards)[:: -(-stored.num_samples // MAX_COUNTED)]
    tables = samples_of(loaded, split, ["json.offset", "json.bytes", "label"], some)
    samples = (sample for rows in tables for sample in rows.to_pylist())
    for json in in_order(storage.reads_at_once, samples, read):
        num_read += 1
        with suppress(BadTarget):
            annotated = boxes_in(json, loaded.manifest.labels_by_category)
            boxes.update(box.label for box in annotated)
    return num_read, boxes


def overview(
    loaded: LoadedSet, url: str, *, split: str | None = None, label: int | None = None
) -> dict[str, Any]:
    """The JSON of `split` (or all splits) and of the class `label` (or all classes); of a set, from
    the manifest alone.

    `counts` are samples. In a set of COCO's categories, they are boxes, and `boxes_in` has the
    number of samples of each split in which these were counted.
    """
    manifest, num_counted = counted(loaded), dict[str, int]()
    splits = dict(manifest.splits) if split is None else {split: manifest.split(split)}
    totals = {name: stored.class_totals for name, stored in splits.items()}
    for name in splits if manifest.labels_by_category else ():
        num_counted[name], boxes = count_boxes(loaded, name)
        totals[name] = [boxes[info.label] for info in manifest.classes]
    return {
        "url": url,
        "version": manifest.number,
        "digest": manifest.digest,
        "source": manifest.provenance.source,
        "seed": manifest.seed,
        "splits": split_table.of_set(splits),
        "classes": [
            msgspec.structs.asdict(info)
            | {"counts": {name: counts[info.label] for name, counts in totals.items()}}
            for info in manifest.classes
            if label in (None, info.label)
        ],
        "shards": [
            {"split": name, "number": number}
            | {field: getattr(shard, field) for field in _SHARD_FIELDS}
            for name, stored in splits.items()
            for number, shard in enumerate(stored.shards if loaded.view is None else ())
        ],
        "boxes_in": num_counted,
        "columns": listed_columns(loaded.without_view()),
        "num_quarantined": manifest.quarantine.count,
        "fixes": manifest.fixes,
        "notes": manifest.provenance.notes,
        "label": label,
    }


def find_label(manifest: Manifest, wanted: str) -> int:
    """The label of the class that `wanted` names by wnid, name or label; raises ConfigError if none
    or several.
    """
    number = int(wanted) if wanted.isdecimal() else -1
    for kind in ("wnid", "name", "label"):
        labels = [
            info.label for info in manifest.classes if getattr(info, kind) in (wanted, number)
        ]
        if len(labels) > 1:
            raise ConfigError(f"classes {labels} are all called {wanted!r}; give the label instead")
        if labels:
            return labels[0]
    names = [info.name for info in manifest.classes]
    raise ConfigError(
        f"no class {wanted!r} among the {len(names)} of this set"
        f" ({some_of(names, 5)}){did_you_mean(wanted, names)}"
    )


def _of_shard(loaded: LoadedSet, split: str | None, number: int) -> Iterator[pa.Table]:
    """The samples of one shard in position order; raises ConfigError, NotFound or DamagedShard."""
    splits = loaded.manifest.splits
    if split is None and len(splits) > 1:
        names = " or --split ".join(sorted(splits))
        raise ConfigError(f"every split has its own shards; add --split {names}")
    split = split or next(iter(splits))
    num_shards = splits[split].num_shards
    if not 0 <= number < num_shards:
        raise ConfigError(
            f"no shard {number} in split {split!r}: it has {num_shards}, numbered 0 to"
            f" {num_shards - 1}"
        )
    return samples_of(loaded, split, shards=[number])


def _of_key(loaded: LoadedSet, split: str | None, key: str) -> list[pa.Table]:
    """The sample with that key, and its copies (`KEY@2`); reads the indexes.

    Raises ConfigError if the whole set has none.
    """
    wanted = key.encode(errors="backslashreplace").decode()
    is_copy = pc.starts_with(pc.field("key"), f"{wanted}@") & (pc.field("copy") > 0)
    tables = _where(loaded, split, (pc.field("key") == wanted) | is_copy)
    if tables is None:
        advice = "look at some keys with --shard 0, or search by --name"
        if manifests.hash_of_key(key) in loaded.manifest.forgotten:
            advice = f"`compact` dropped it; {_OLDER}"
        raise ConfigError(f"no sample has the key {key!r}; {advice}")
    return tables


def _of_name(loaded: LoadedSet, split: str | None, name: str) -> list[pa.Table]:
    """All samples made from the raw sample of that original name, or of a name that ends with `/`
    and it.

    Raises ConfigError if the whole set has none, with the reason if the raw sample was rejected.
    """
    manifest, storage, _ = loaded
    wanted = name.encode(errors="backslashreplace").decode()
    is_end = pc.ends_with(pc.field("name"), f"/{wanted}")
    tables = _where(loaded, split, (pc.field("name") == wanted) | is_end)
    if tables is None:
        unknown = (
            f"no sample was made from {name!r}, and {manifest.quarantine.path} does not list it;"
            " check the spelling"
        )
        if manifest.forgotten:
            unknown += f", or `compact` dropped it; {_OLDER}"
        if not manifest.has_names:
            unknown = f"{storage.url}: no build made this set, so samples have no names; use --key"
        raise ConfigError(_why_rejected(loaded, name, split) or unknown)
    return tables


def _where(loaded: LoadedSet, split: str | None, condition: pc.Expression) -> list[pa.Table] | None:
    """The samples for which a condition holds, by shard; None if the whole set has none."""
    splits = [*loaded.manifest.splits] if split is None else [split]
    tables = [rows.filter(condition) for name in splits for rows in samples_of(loaded, name)]
    if any(tables):
        return tables
    if loaded.view is None:
        return None
    stored = None if split is None else loaded.stored_split(split)
    return None if _where(loaded.without_view(), stored, condition) is None else []


def _why_rejected(loaded: LoadedSet, name: str, split: str | None) -> str:
    """The reasons why the quarantine list has that name; "" if it does not."""
    listed = loaded.manifest.quarantine
    entries = read_quarantine(loaded.storage, listed) if listed.count else []
    reasons = [
        f"{entry.get('name')} (split {entry.get('split')}): {entry.get('reason')}"
        for entry in entries
        if entry
        and f"/{entry.get('name')}".endswith(f"/{name}")
        and split in (None, entry.get("split"))
    ]
    if not reasons:
        return ""
    more = f"; and {len(reasons) - _MAX_REASONS:,} more" if len(reasons) > _MAX_REASONS else ""
    first = "; ".join(reasons[:_MAX_REASONS])
    return f"no sample was made from {name!r}; {listed.path} says why: {first}{more}"


_PLACE = ("split", "shard", "number", "position", "id", "key", "name", "label")
_ORIGIN = ("width", "height", "serial", "copy")


def _facts_of(manifest: Manifest, rows: pa.Table) -> Iterator[dict[str, Any]]:
    """What `inspect` says of samples; `byte_ranges` maps a field to (offset, bytes) in the tar."""
    fields = fields_of(rows.column_names)
    for row in rows.to_pylist():
        ranges = {field: (row[f"{field}.offset"], row[f"{field}.bytes"]) for field in fields}
        yield {
            **{name: row[name] for name in _PLACE},
            "class_name": manifest.class_name(row["label"]),
            **{name: row[name] for name in _ORIGIN},
            "byte_ranges": {field: place for field, place in ranges.items() if None not in place},
        }
