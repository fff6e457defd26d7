"""Answers one question about a shard set: an overview, or the samples of a shard, of a key or of an
original name.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from pipelines import split_table
from pipelines.check.problems import read_quarantine
from pipelines.plan.files import in_order
from shardset.errors import BadTarget, ConfigError
from shardset.format import manifest as manifests
from shardset.format.annotations import boxes_in
from shardset.format.manifest import LoadedSet, Manifest, Shard
from shardset.format.rows import fields_of, keys_of, numbers, ranges_of
from shardset.format.write import class_counts
from shardset.program import did_you_mean, some_of
from shardset.read.indexes import read_index
from shardset.storage.base import Storage

NO_NAME = "original names are not known: no build made these samples"
_OLDER = "older versions have it as long as they are left: `log SET` lists them, SET@N is one"
_SHARD_FIELDS = ("path", "num_samples", "num_bytes", "first_id")
_COPIED = ("key", "name", "label", "width", "height", "serial", "copy")
MAX_COUNTED = 5_000
"""Boxes are counted in so many samples of a split, because each is a read of its own."""

_MAX_REASONS = 20
"""An error lists this many entries of the quarantine list."""


class SampleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One stored sample. `name` is its name in the raw input, None if no build made it.

    `id` counts over the split, `position` in the shard. `byte_ranges` maps a field to (offset,
    bytes) in the tar.
    """

    split: str
    shard: str
    number: int
    position: int
    id: int
    key: str
    name: str | None
    label: int
    class_name: str
    width: int | None
    height: int | None
    serial: int
    copy: int
    byte_ranges: dict[str, tuple[int, int]]


def inspect(
    url: str,
    *,
    split: str | None = None,
    shard: int | None = None,
    key: str | None = None,
    name: str | None = None,
    class_name: str | None = None,
) -> dict[str, Any] | list[SampleInfo]:
    """The answer from the set or view at `url`: samples, or an overview if none are asked for.

    At most one of `shard`, `key` and `name`; optionally only in one split or class (a name, a wnid
    or a label). Raises ConfigError if there is no such split, class, shard or sample.
    """
    loaded = manifests.load(url)
    splits, whole = loaded.manifest.splits, loaded.without_view()
    if split is not None:
        loaded.manifest.split(split)
    label = None if class_name is None else find_label(loaded.manifest, class_name)
    stored = None if split is None else loaded.stored_split(split)
    if key is not None:
        samples = find_key(whole, key, split=stored)
    elif name is not None:
        samples = find_name(whole, name, split=stored)
    elif shard is not None:
        if split is None and len(splits) > 1:
            names = " or --split ".join(sorted(splits))
            raise ConfigError(f"every split has its own shards; add --split {names}")
        samples = samples_of_shard(whole, stored or next(iter(whole.manifest.splits)), shard)
    else:
        manifest, num_counted = counted(loaded), dict[str, int]()
        for name in splits if manifest.labels_by_category else ():
            num_counted[name], boxes = count_boxes(loaded, name)
            totals = [boxes[info.label] for info in manifest.classes]
            one = msgspec.structs.replace(manifest.splits[name], class_totals=totals)
            manifest.splits[name] = one
        found = overview(manifest, url, split=split, label=label) | {"boxes_in": num_counted}
        return found if loaded.view is None else found | {"shards": []}
    if loaded.view is not None:
        samples = [
            each
            for wanted in ([split] if split else splits)
            for one in samples
            for each in _in_view(loaded, wanted, one)
        ]
    return [sample for sample in samples if label in (None, sample.label)]


def counted(loaded: LoadedSet) -> Manifest:
    """The manifest, with the samples and classes that a view takes in the totals of its splits;
    reads the indexes.
    """
    splits = dict(loaded.manifest.splits)
    for name, part in loaded.view.splits.items() if loaded.view else ():
        stored = np.concatenate(
            [
                numbers(read_index(loaded.storage, shard, ["label"]), "label")
                for shard in splits[name].shards
            ]
        )
        labels = part.labels_of(part.rows.ids, stored[part.rows.ids])
        totals = class_counts(labels, len(loaded.manifest.classes)).tolist()
        splits[name] = msgspec.structs.replace(
            splits[name], num_samples=len(labels), class_totals=totals
        )
    return msgspec.structs.replace(loaded.manifest, splits=splits)


def count_boxes(loaded: LoadedSet, split: str) -> tuple[int, Counter[int]]:
    """The number of samples that were read, about MAX_COUNTED of a split, and their boxes by label.

    A sample whose annotations can't be read has none; `verify --deep` names it.
    """
    storage, part, stored = loaded.storage, loaded.part(split), loaded.manifest.split(split)
    boxes, num_read = Counter[int](), 0

    def ranges() -> Iterator[tuple[str, int, int]]:
        for shard in stored.shards[:: -(-stored.num_samples // MAX_COUNTED)]:
            index = read_index(storage, shard, ["json.offset", "json.bytes", "label"])
            starts, sizes = ranges_of(index, "json")
            is_taken = part.selection.has(shard.first_id + np.arange(len(starts)))
            for offset, size in zip(starts[is_taken], sizes[is_taken], strict=True):
                yield shard.path, int(offset), int(offset + size)

    for json in in_order(storage, ranges(), lambda each: storage.read(*each)):
        num_read += 1
        with suppress(BadTarget):
            found = boxes_in(json or b"{}", loaded.manifest.labels_by_category)
            boxes.update(box.label for box in found)
    return num_read, boxes


def _in_view(loaded: LoadedSet, split: str, sample: SampleInfo) -> Iterator[SampleInfo]:
    """A stored sample with its label in a split of a view; none where it is not in that."""
    part, ids = loaded.part(split), np.array([sample.id])
    if loaded.stored_split(split) == sample.split and part.selection.has(ids).item():
        label = part.labels_of(ids, np.array([sample.label])).item()
        class_name = loaded.manifest.class_name(label)
        yield msgspec.structs.replace(sample, split=split, label=label, class_name=class_name)


def overview(
    manifest: Manifest, url: str, *, split: str | None = None, label: int | None = None
) -> dict[str, Any]:
    """The JSON of `split` (or all splits) and of the class `label` (or all classes), from the
    manifest alone.

    `counts` are samples. In a set of COCO's categories, `inspect` makes them boxes, and `boxes_in`
    has the number of samples of each split in which it has counted them.
    """
    splits = dict(manifest.splits) if split is None else {split: manifest.split(split)}
    totals = {name: one.class_totals for name, one in splits.items()}
    return {
        "url": url,
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
            for name, one in splits.items()
            for number, shard in enumerate(one.shards)
        ],
        "boxes_in": {},
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


def samples_of_shard(loaded: LoadedSet, split: str, number: int) -> list[SampleInfo]:
    """The samples of one shard in position order; raises ConfigError, NotFound or DamagedShard."""
    shards = loaded.manifest.split(split).shards
    if not 0 <= number < len(shards):
        raise ConfigError(
            f"no shard {number} in split {split!r}: it has {len(shards)}, numbered 0 to"
            f" {len(shards) - 1}"
        )
    index = read_index(loaded.storage, shards[number])
    return _samples(loaded, split, number, index, range(len(index)))


def find_key(loaded: LoadedSet, key: str, *, split: str | None = None) -> list[SampleInfo]:
    """The sample with that key, and its copies (`KEY@2`); reads the indexes.

    Raises ConfigError if there is none.
    """
    wanted = key.encode("utf-8", "surrogateescape")

    def in_shard(name: str, number: int, shard: Shard) -> list[SampleInfo]:
        index = read_index(loaded.storage, shard)
        keys = keys_of(index)
        is_copy = np.char.startswith(keys, wanted + b"@") & (numbers(index, "copy") > 0)
        rows = np.flatnonzero((keys == wanted) | is_copy).tolist()
        return _samples(loaded, name, number, index, rows)

    samples = _over_shards(loaded, split, in_shard)
    if not samples:
        advice = "look at some keys with --shard 0, or search by --name"
        if manifests.hash_of_key(key) in loaded.manifest.forgotten:
            advice = f"`compact` dropped it; {_OLDER}"
        raise ConfigError(f"no sample has the key {key!r}; {advice}")
    return samples


def find_name(loaded: LoadedSet, name: str, *, split: str | None = None) -> list[SampleInfo]:
    """All samples made from the raw sample of that original name, or of a name that ends with `/`
    and it.

    Raises ConfigError if no sample is found, with the reason if the raw sample was rejected.
    """
    manifest, storage, _ = loaded

    def in_shard(split_name: str, number: int, shard: Shard) -> list[SampleInfo]:
        index = read_index(storage, shard)
        names = index["name"].to_pylist()
        rows = [row for row, found in enumerate(names) if f"/{found or ''}".endswith(f"/{name}")]
        return _samples(loaded, split_name, number, index, rows)

    samples = _over_shards(loaded, split, in_shard)
    if not samples:
        unknown = (
            f"no sample was made from {name!r}, and {manifest.quarantine.path} does not list it;"
            " check the spelling"
        )
        if manifest.forgotten:
            unknown += f", or `compact` dropped it; {_OLDER}"
        if not manifest.has_names:
            unknown = f"{storage.url}: no build made this set, so samples have no names; use --key"
        raise ConfigError(_why_rejected(storage, manifest, name, split) or unknown)
    return samples


def _why_rejected(storage: Storage, manifest: Manifest, name: str, split: str | None) -> str:
    """The reasons why the quarantine list has that name; "" if it does not."""
    entries = read_quarantine(storage, manifest.quarantine) if manifest.quarantine.count else []
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
    listed = "; ".join(reasons[:_MAX_REASONS])
    return f"no sample was made from {name!r}; {manifest.quarantine.path} says why: {listed}{more}"


def _over_shards(
    loaded: LoadedSet, split: str | None, in_shard: Callable[[str, int, Shard], list[SampleInfo]]
) -> list[SampleInfo]:
    tasks = [
        (name, number, shard)
        for name in (loaded.manifest.splits if split is None else [split])
        for number, shard in enumerate(loaded.manifest.split(name).shards)
    ]
    found = in_order(loaded.storage, tasks, lambda task: in_shard(*task))
    return [sample for samples in found for sample in samples]


def _samples(
    loaded: LoadedSet, split: str, number: int, index: pa.Table, rows: Sequence[int]
) -> list[SampleInfo]:
    """The samples in some rows of the index of a shard."""
    shard, fields = loaded.manifest.splits[split].shards[number], fields_of(index.column_names)
    found = index.take(pa.array(rows, pa.int64())).to_pylist()
    return [
        SampleInfo(
            split=split,
            shard=shard.path,
            number=number,
            position=position,
            id=shard.first_id + position,
            class_name=loaded.manifest.class_name(row["label"]),
            byte_ranges={
                field: (row[f"{field}.offset"], row[f"{field}.bytes"])
                for field in fields
                if row[f"{field}.offset"] is not None
            },
            **{name: row[name] for name in _COPIED},
        )
        for position, row in zip(rows, found, strict=True)
    ]
