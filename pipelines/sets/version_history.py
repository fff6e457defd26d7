"""Names the versions of a set, lists them, and compares two sets by their indexes."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from shardset.errors import ConfigError, PreconditionFailed
from shardset.format import manifest as manifests
from shardset.format import versions
from shardset.format.manifest import LoadedSet, Shard
from shardset.format.versions import Tag
from shardset.program import count
from shardset.read.indexes import read_index
from shardset.storage.base import ABSENT
from shardset.storage.open import is_web

KINDS = ("added", "removed", "relabelled", "changed")
"""How a sample may differ; one that is relabelled is not counted as changed too."""


class DifferentSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that two sets do not have alike.

    Its classes are None in the set that lacks it, "" without a label.
    """

    kind: str
    split: str
    key: str
    old_class: str | None
    new_class: str | None


def tag(url: str, name: str) -> Tag:
    """Gives the version at an address a name;
    ConfigError if the name is taken by another version.
    """
    if not versions.is_tag(name):
        raise ConfigError(
            f"{name!r} can't be a tag; use up to 64 letters, digits, ., _ and -, and not only"
            " digits"
        )
    manifest, storage, _ = manifests.load_whole(url)
    made = Tag(version=manifest.number, digest=manifest.digest)
    try:
        storage.write(versions.tag_path(name), msgspec.json.encode(made), if_generation=ABSENT)
    except PreconditionFailed as error:
        raise ConfigError(
            f"{url}: another version has the tag {name!r}, and tags never move; choose a name"
        ) from error
    return made


def log(url: str) -> list[dict[str, Any]]:
    """The versions of a set that are left, the newest first.

    `tags` are None on a web server, which lists none.
    """
    newest, storage, _ = manifests.load_whole(url)
    tags = None if is_web(storage.url) else versions.tags(storage)
    return [
        {
            "version": version.number,
            "digest": version.digest,
            "samples": {name: split.num_samples for name, split in version.splits.items()},
            "tags": None
            if tags is None
            else sorted(name for name, tag in tags.items() if tag.digest == version.digest),
        }
        for version in (newest, *manifests.older(storage))
    ]


def log_lines(entries: list[dict[str, Any]]) -> list[str]:
    """The log as lines for a terminal."""
    lines = [
        f"version {entry['version']}  {entry['digest'][:12]}  "
        + ", ".join(f"{name} {number:,}" for name, number in entry["samples"].items())
        + "".join(f"  @{name}" for name in entry["tags"] or ())
        for entry in entries
    ]
    is_listed = entries[0]["tags"] is not None
    return lines if is_listed else [*lines, "tags: a web server lists none; SET@TAG finds one"]


def diff(old: str, new: str) -> list[DifferentSample]:
    """The samples that two sets do not have alike, by key; reads only the indexes of shards that
    one of them lacks.
    """
    sets = manifests.load_whole(old), manifests.load_whole(new)
    names = sorted({name for loaded in sets for name in loaded.manifest.splits})
    return [sample for name in names for sample in _diff_split(*sets, name)]


def diff_lines(samples: list[DifferentSample]) -> list[str]:
    """The numbers of the differences, by split and by class, as lines for a terminal."""
    counts = Counter(
        (
            sample.split,
            sample.new_class if sample.old_class is None else sample.old_class,
            sample.kind,
        )
        for sample in samples
    )
    rows = dict.fromkeys((split, name) for split, name, _ in sorted(counts))
    lines = [
        f"{split}, {name or 'no class'}: "
        + ", ".join(f"{n:,} {kind}" for kind in KINDS if (n := counts[split, name, kind]))
        for split, name in rows
    ]
    return [
        *lines,
        f"{count(len(samples), 'sample')} differ" if samples else "the same samples",
    ]


def _diff_split(old: LoadedSet, new: LoadedSet, split: str) -> Iterator[DifferentSample]:
    both = [
        loaded.manifest.splits[split].shards if split in loaded.manifest.splits else ()
        for loaded in (old, new)
    ]
    shared = set[str]()
    if all(a == b for a, b in zip(old.manifest.classes, new.manifest.classes, strict=False)):
        shared = set.intersection(*({shard.sha256 for shard in shards} for shards in both))
    before, after = _samples(old, both[0], shared), _samples(new, both[1], shared)
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key), after.get(key)
        if was == now:
            continue
        old_class, new_class = was and was[0], now and now[0]
        kind = "changed" if old_class == new_class else "relabelled"
        if was is None:
            kind = "added"
        elif now is None:
            kind = "removed"
        yield DifferentSample(
            kind=kind, split=split, key=key, old_class=old_class, new_class=new_class
        )


def _samples(
    loaded: LoadedSet, shards: Iterable[Shard], without: set[str]
) -> dict[str, tuple[str, int]]:
    """The class and the CRC32C (of the image, if it has one) of each sample by key, without those
    of some shards.
    """
    columns, class_name = ["key", "label", "crc32c", "image_crc32c"], loaded.manifest.class_name
    return {
        row["key"]: (class_name(row["label"]), row["image_crc32c"] or row["crc32c"])
        for shard in shards
        if shard.sha256 not in without
        for row in read_index(loaded.storage, shard, columns).to_pylist()
    }
