"""An overview of splits, classes and shards, from the manifest alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardset.errors import ConfigError
from shardset.format.manifest import ClassInfo, Manifest, Split


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

    @property
    def per_shard(self) -> str:
        """Samples of a shard: `500`, or `499 to 500`."""
        return f"{self.smallest:,}" if self.smallest == self.largest else f"{self.smallest:,} to {self.largest:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """One class: its samples by split."""

    label: int
    name: str
    wnid: str | None
    counts: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """One shard."""

    split: str
    number: int
    path: str
    num_samples: int
    num_bytes: int
    first_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A shard set on one page. With `label`, `classes` is that class only."""

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
    """The overview of `split` (or all splits) and of the class `label` (or all classes)."""
    splits = dict(manifest.splits) if split is None else {split: manifest.split(split)}
    totals = {name: one.class_totals for name, one in splits.items()}
    return Overview(
        url=url,
        digest=manifest.digest,
        source=manifest.provenance.source,
        seed=manifest.seed,
        splits=[_split_row(name, one) for name, one in splits.items()],
        classes=[_class_row(info, totals) for info in manifest.classes if label in (None, info.label)],
        shards=[row for name, one in splits.items() for row in _shard_rows(name, one)],
        num_quarantined=manifest.quarantine.count,
        fixes=manifest.fixes,
        notes=manifest.provenance.notes,
        label=label,
    )


def find_label(manifest: Manifest, wanted: str) -> int:
    """The label of the class that `wanted` names by wnid, name or label; raises ConfigError if none or several."""
    for matches in (lambda i: i.wnid == wanted, lambda i: i.name == wanted, lambda i: str(i.label) == wanted):
        labels = [info.label for info in manifest.classes if matches(info)]
        if len(labels) > 1:
            raise ConfigError(f"classes {labels} are all called {wanted!r}; give the label instead")
        if labels:
            return labels[0]
    known = ", ".join(info.name for info in manifest.classes[:5])
    raise ConfigError(f"no class {wanted!r} among the {len(manifest.classes)} of this set ({known}, ...)")


def _split_row(name: str, split: Split) -> SplitRow:
    sizes = split.shard_sizes
    same = ("num_samples", "num_shards", "fields", "num_source_samples", "num_dropped", "num_repeats")
    return SplitRow(
        name=name,
        smallest=min(sizes, default=0),
        largest=max(sizes, default=0),
        num_bytes=split.num_tar_bytes,
        mean_bytes=split.mean_bytes,
        **{field: getattr(split, field) for field in same},
    )


def _class_row(info: ClassInfo, totals: dict[str, list[int]]) -> ClassRow:
    counts = {name: counts[info.label] for name, counts in totals.items()}
    return ClassRow(label=info.label, name=info.name, wnid=info.wnid, counts=counts)


def _shard_rows(name: str, split: Split) -> Iterator[ShardRow]:
    for number, shard in enumerate(split.shards):
        yield ShardRow(
            split=name,
            number=number,
            path=shard.path,
            num_samples=shard.num_samples,
            num_bytes=shard.num_bytes,
            first_id=shard.first_id,
        )
