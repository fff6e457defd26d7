"""Looks into a shard set: its splits, shards and classes; a sample by its key or its original name.

Functions that give records come first, then those that draw them as tables; `run` is the verb.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pipelines.check import quarantine
from pipelines.images.check import fixes_of
from pipelines.terminal import on_standard_output, plain
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format.manifest import ClassInfo, Manifest, Shard, Split
from shardset.format.originals import Origin, read_origins
from shardset.format.tar import index_fields
from shardset.read.indexes import read_index
from shardset.storage.base import Storage

THREADS = 8
MAX_ROWS = 20
"""Longer tables are cut on a terminal, and say so; JSON holds everything."""

MIN_LETTERS = 7
"""Where columns of names would be narrower, numbers are folded too."""

NO_NAMES = (
    "original names are not available: the plan folder beside the manifest is missing, or of another build or version"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInfo:
    """One stored sample. `name` is what it was called in the raw input, None if the plan is not there any more.

    `id` counts over the split, `position` in the shard; `places` maps a field to (offset, bytes) in the tar.
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
    source: int
    copy: int
    places: dict[str, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all fields."""
        return sum(size for _, size in self.places.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRow:
    """One split in numbers: `smallest` and `largest` are samples of a shard, `num_bytes` is that of all tars."""

    name: str
    num_samples: int
    num_shards: int
    smallest: int
    largest: int
    num_bytes: int
    mean_bytes: float
    fields: list[str]
    num_source_samples: int
    num_dropped: int
    num_repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """One class: its samples by split."""

    label: int
    name: str
    wnid: str | None
    counts: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """One shard: `num_of_class` counts the samples of the class that was asked for, or all."""

    split: str
    number: int
    path: str
    num_samples: int
    num_bytes: int
    first_id: int
    num_of_class: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A shard set on one page; with `label`, its `classes` and the shards' `num_of_class` are those of one class."""

    url: str
    digest: str
    source: str
    seed: int
    splits: list[SplitRow]
    classes: list[ClassRow]
    shards: list[ShardRow]
    num_quarantined: int
    fixes: dict[str, int]
    notes: list[str]
    label: int | None


def overview(manifest: Manifest, url: str, *, split: str | None = None, label: int | None = None) -> Overview:
    """Everything that the manifest says of `split` (or all) and of the class `label` (or all); reads nothing."""
    splits = _splits(manifest, split)
    return Overview(
        url=url,
        digest=manifest.digest,
        source=manifest.provenance.source,
        seed=manifest.seed,
        splits=[_split_row(name, found) for name, found in splits.items()],
        classes=[_class_row(info, splits) for info in manifest.classes if label in (None, info.label)],
        shards=[row for name, found in splits.items() for row in _shard_rows(name, found, label)],
        num_quarantined=manifest.quarantine.count,
        fixes=manifest.fixes,
        notes=manifest.provenance.notes,
        label=label,
    )


def find_label(manifest: Manifest, wanted: str) -> int:
    """The label of the class that is called `wanted` by wnid, name or label; raises ConfigError if none or several."""
    for same in (lambda info: info.wnid == wanted, lambda info: info.name == wanted, lambda i: str(i.label) == wanted):
        labels = [info.label for info in manifest.classes if same(info)]
        if len(labels) > 1:
            raise ConfigError(f"classes {labels} are all called {wanted!r}; give the label instead")
        if labels:
            return labels[0]
    known = ", ".join(info.name for info in manifest.classes[:5])
    raise ConfigError(f"no class {wanted!r} among the {len(manifest.classes)} of this set ({known}, ...)")


def samples_of_shard(storage: Storage, manifest: Manifest, split: str, number: int) -> list[SampleInfo]:
    """The samples of one shard in position order; raises ConfigError, NotFound or DamagedShard."""
    shards = manifest.split(split).shards
    if not 0 <= number < len(shards):
        raise ConfigError(
            f"no shard {number} in split {split!r}: it has {len(shards)}, numbered 0 to {len(shards) - 1}"
        )
    index = read_index(storage, shards[number])
    origins = read_origins(storage, split, number, index["key"])
    return [_sample(manifest, split, number, index, row, origins) for row in range(len(index))]


def find_key(storage: Storage, manifest: Manifest, key: str, *, split: str | None = None) -> list[SampleInfo]:
    """The sample with that key, and its copies; reads the indexes. Raises ConfigError if there is none."""

    def rows(name: str, number: int, shard: Shard) -> list[SampleInfo]:
        index = read_index(storage, shard)
        near = np.flatnonzero(np.char.startswith(index["key"], key.encode("utf-8", "surrogateescape")))
        here = [row for row in near.tolist() if is_copy(index["key"][row].decode("ascii", "replace"), key)]
        origins = read_origins(storage, name, number, index["key"]) if here else None
        return [_sample(manifest, name, number, index, row, origins) for row in here]

    found = _over_shards(_splits(manifest, split), rows)
    if not found:
        raise ConfigError(f"no sample has the key {key!r}; look at some keys with --shard 0, or search by --name")
    return found


def find_name(storage: Storage, manifest: Manifest, name: str, *, split: str | None = None) -> list[SampleInfo]:
    """All samples made from the raw sample of that original name, or of a name that ends with `/` and it.

    Reads the plan. Raises ConfigError if there is none, saying why where it was rejected, or if the plan is gone.
    """

    def none(otherwise: str) -> ConfigError:
        return ConfigError(_why_rejected(storage, manifest, name, split) or otherwise)

    no_names = f"{storage.url}: {NO_NAMES}; search by --key"

    def rows(split_name: str, number: int, shard: Shard) -> list[SampleInfo]:
        origins = read_origins(storage, split_name, number, None)
        if origins is None:
            raise none(no_names)
        here = [row for row, origin in enumerate(origins) if f"/{origin.name}".endswith(f"/{name}")]
        if not here:
            return []
        index = read_index(storage, shard)
        if read_origins(storage, split_name, number, index["key"]) is None:
            raise ConfigError(no_names)
        return [_sample(manifest, split_name, number, index, row, origins) for row in here]

    found = _over_shards(_splits(manifest, split), rows)
    if not found:
        raise none(
            f"no sample was made from {name!r}, and {manifest.quarantine.path} does not list it; is it misspelled?"
        )
    return found


def _why_rejected(storage: Storage, manifest: Manifest, name: str, split: str | None) -> str:
    """What the quarantine list says of a name; empty if it says nothing."""
    entries = [
        f"{entry.get('name')} (split {entry.get('split')}): {entry.get('reason')}"
        for entry in quarantine.find(storage, manifest, name)
        if split in (None, entry.get("split"))
    ]
    if not entries:
        return ""
    more = f"; and {len(entries) - MAX_ROWS:,} more" if len(entries) > MAX_ROWS else ""
    listed = "; ".join(entries[:MAX_ROWS])
    return f"no sample was made from {name!r}; {manifest.quarantine.path} says why: {listed}{more}"


def is_copy(stored: str, key: str) -> bool:
    """Whether the stored key is `key` or one of its copies (`KEY@2`)."""
    return stored == key or (stored.startswith(f"{key}@") and stored[len(key) + 1 :].isdigit())


def read_fixes(
    storage: Storage, manifest: Manifest, shards: Sequence[tuple[str, int, np.ndarray]], most: int
) -> list[tuple[str, int, int, str, str]]:
    """(split, shard, position, fix, original name) of up to `most` fixed samples of the shards (split, number, keys).

    Reads the plan, only as far as needed; what it does not tell any more is left out.
    """
    found: list[tuple[str, int, int, str, str]] = []
    for split, number, keys in shards if manifest.fixes else []:
        origins = read_origins(storage, split, number, keys) or []
        fixes = ((row, ", ".join(fixes_of(origin.fix)), origin.name) for row, origin in enumerate(origins))
        found += [(split, number, row, fix, name) for row, fix, name in fixes if fix]
        if len(found) >= most:
            break
    return found[:most]


def _over_shards(splits: dict[str, Split], rows: Callable[[str, int, Shard], list[SampleInfo]]) -> list[SampleInfo]:
    tasks = [(name, number, shard) for name, split in splits.items() for number, shard in enumerate(split.shards)]
    with ThreadPoolExecutor(THREADS) as threads:
        return [sample for found in threads.map(lambda task: rows(*task), tasks) for sample in found]


def _splits(manifest: Manifest, split: str | None) -> dict[str, Split]:
    return dict(manifest.splits) if split is None else {split: manifest.split(split)}


def _sample(
    manifest: Manifest, split: str, number: int, index: np.ndarray, row: int, origins: list[Origin] | None
) -> SampleInfo:
    shard, record = manifest.splits[split].shards[number], index[row]
    label = int(record["label"])
    places = {field: (int(record[f".{field}"][0]), int(record[f".{field}"][1])) for field in index_fields(index)}
    return SampleInfo(
        split=split,
        shard=shard.path,
        number=number,
        position=row,
        id=shard.first_id + row,
        key=record["key"].decode("ascii", "replace"),
        name=origins[row].name if origins else None,
        label=label,
        class_name=manifest.classes[label].name if 0 <= label < len(manifest.classes) else "",
        source=int(record["source"]),
        copy=int(record["copy"]),
        places={field: place for field, place in places.items() if place != (0, 0)},
    )


def _split_row(name: str, split: Split) -> SplitRow:
    sizes = [shard.num_samples for shard in split.shards]
    return SplitRow(
        name=name,
        num_samples=split.num_samples,
        num_shards=split.num_shards,
        smallest=min(sizes, default=0),
        largest=max(sizes, default=0),
        num_bytes=sum(shard.num_bytes for shard in split.shards),
        mean_bytes=split.mean_bytes,
        fields=split.fields,
        num_source_samples=split.num_source_samples,
        num_dropped=split.num_dropped,
        num_repeats=split.num_repeats,
    )


def _class_row(info: ClassInfo, splits: dict[str, Split]) -> ClassRow:
    counts = {name: sum(shard.class_counts[info.label] for shard in split.shards) for name, split in splits.items()}
    return ClassRow(label=info.label, name=info.name, wnid=info.wnid, counts=counts)


def _shard_rows(name: str, split: Split, label: int | None) -> Iterator[ShardRow]:
    for number, shard in enumerate(split.shards):
        yield ShardRow(
            split=name,
            number=number,
            path=shard.path,
            num_samples=shard.num_samples,
            num_bytes=shard.num_bytes,
            first_id=shard.first_id,
            num_of_class=shard.num_samples if label is None else shard.class_counts[label],
        )


def to_json(found: Overview | Sequence[SampleInfo]) -> str:
    """An overview as one object, samples as an array."""
    return json.dumps(msgspec.to_builtins(found), indent=1)


def render_overview(found: Overview) -> RenderableType:
    """The overview as tables: splits, classes, shards, and lines for the rest."""
    lines = [
        f"{found.url}: from {found.source}, seed {found.seed}, digest {found.digest[:12]}",
        f"quarantined: {found.num_quarantined:,}",
        f"fixed: {', '.join(f'{name} {count:,}' for name, count in found.fixes.items()) or 'none'}",
        *(f"note: {note}" for note in found.notes),
    ]
    first, *others = (plain(line) for line in lines)
    return Group(first, _splits_table(found), _classes_table(found), _shards_table(found), *others)


def render_samples(samples: Sequence[SampleInfo], *, max_rows: int = MAX_ROWS) -> RenderableType:
    """Samples as a table; a single one as a table of all that is known of it."""
    if len(samples) == 1:
        return _sample_table(samples[0])
    rows = [
        (s.split, s.number, s.position, s.key, "" if s.name is None else s.name, s.label, s.class_name, s.num_bytes)
        for s in samples
    ]
    table = _table("samples", ["split", "shard", "position", "key", "name", "label", "class", "bytes"], rows, max_rows)
    return table if all(s.name is not None for s in samples) else Group(table, NO_NAMES)


def _sample_table(sample: SampleInfo) -> RenderableType:
    places = [(field, f"{size:,} bytes at {offset:,}") for field, (offset, size) in sample.places.items()]
    facts = [
        ("key", sample.key),
        ("original name", NO_NAMES if sample.name is None else sample.name),
        ("label", f"{sample.label} {sample.class_name}".strip()),
        ("stored in", f"{sample.shard} at position {sample.position} (id {sample.id} of split {sample.split})"),
        ("made from", f"raw sample {sample.source} of the split{f', copy {sample.copy}' if sample.copy else ''}"),
        *places,
    ]
    return _table("sample", ["", ""], facts, len(facts))


def _splits_table(found: Overview) -> RenderableType:
    left_out = [name for name in ("dropped", "repeats") if any(getattr(row, f"num_{name}") for row in found.splits)]
    columns = ["split", "samples", "shards", "per shard", "bytes", "mean", *left_out, "fields"]
    rows = [
        (
            row.name,
            row.num_samples,
            row.num_shards,
            f"{row.smallest:,}" if row.smallest == row.largest else f"{row.smallest:,} to {row.largest:,}",
            row.num_bytes,
            round(row.mean_bytes),
            *(getattr(row, f"num_{name}") for name in left_out),
            " ".join(row.fields),
        )
        for row in found.splits
    ]
    return _table("splits", columns, rows, MAX_ROWS)


def _classes_table(found: Overview) -> RenderableType:
    names = [row.name for row in found.splits]
    rows = [(row.label, row.name, row.wnid or "", *(row.counts[name] for name in names)) for row in found.classes]
    return _table("classes", ["label", "name", "wnid", *names], rows, MAX_ROWS)


def _shards_table(found: Overview) -> RenderableType:
    columns = ["split", "shard", "path", "samples", "bytes", "first id"]
    rows = [(row.split, row.number, row.path, row.num_samples, row.num_bytes, row.first_id) for row in found.shards]
    if found.label is None:
        return _table("shards", columns, rows, MAX_ROWS)
    counted = [(*row, shard.num_of_class) for row, shard in zip(rows, found.shards, strict=True)]
    return _table("shards", [*columns, f"of class {found.label}"], counted, MAX_ROWS)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], max_rows: int) -> RenderableType:
    shown = [[f"{cell:,}" if isinstance(cell, int) else plain(cell) for cell in row] for row in rows[:max_rows]]
    numeric = [bool(rows) and isinstance(rows[0][number], int) for number in range(len(columns))]
    caption = f"... and {len(rows) - max_rows:,} more (all of them with --json)" if len(rows) > max_rows else None
    return _Fitted(title, columns, numeric, shown, caption)


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A table that folds names first, and numbers only where it has to: cut ones would be others."""

    title: str
    columns: Sequence[str]
    numeric: Sequence[bool]
    rows: Sequence[Sequence[str | Text]]
    caption: str | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=self.title, title_justify="left", caption=self.caption, caption_justify="left")
        table.show_header = any(self.columns)
        whole = self._num_letters() <= options.max_width
        for name, number in zip(self.columns, self.numeric, strict=True):
            table.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number and whole)
        for row in self.rows:
            table.add_row(*row)
        yield table

    def _num_letters(self) -> int:
        """How wide it is with whole numbers and folded names."""
        widths = [
            max(map(len, column)) if number else MIN_LETTERS
            for number, *column in zip(self.numeric, self.columns, *self.rows, strict=True)
        ]
        return sum(width + 3 for width in widths) + 1


def run(args: argparse.Namespace) -> int:
    """The verb: prints what `args` ask for as tables or JSON and returns the exit code."""
    manifest, storage = manifests.load(args.manifest)
    found = _asked_for(storage, manifest, args)
    if args.json:
        print(to_json(found))
    else:
        on_standard_output().print(render_overview(found) if isinstance(found, Overview) else render_samples(found))
    return 0


def _asked_for(storage: Storage, manifest: Manifest, args: argparse.Namespace) -> Overview | list[SampleInfo]:
    if sum(wanted is not None for wanted in (args.shard, args.key, args.name)) > 1:
        raise ConfigError("--shard, --key and --name ask for different things; give one of them")
    if args.split is not None and args.split not in manifest.splits:
        raise ConfigError(f"no split {args.split!r} in this shard set; it has {', '.join(sorted(manifest.splits))}")
    label = None if args.class_name is None else find_label(manifest, args.class_name)
    if args.key is not None:
        samples = find_key(storage, manifest, args.key, split=args.split)
    elif args.name is not None:
        samples = find_name(storage, manifest, args.name, split=args.split)
    elif args.shard is not None:
        samples = samples_of_shard(storage, manifest, _only_split(manifest, args.split), args.shard)
    else:
        return overview(manifest, args.manifest, split=args.split, label=label)
    return [sample for sample in samples if label in (None, sample.label)]


def _only_split(manifest: Manifest, split: str | None) -> str:
    if split is None and len(manifest.splits) != 1:
        raise ConfigError(f"every split has its own shards; add --split {' or --split '.join(sorted(manifest.splits))}")
    return split or next(iter(manifest.splits))
