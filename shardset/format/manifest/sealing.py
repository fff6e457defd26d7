"""The JSON of a manifest: sealed with its digest when it is written, checked when it is read."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import msgspec

from shardset.errors import ManifestError
from shardset.format import naming
from shardset.format.manifest.records import VERSION, Manifest, Split
from shardset.format.shards import Group, StoredShards
from shardset.prepared import JSON_ERRORS

_NUMBERS = re.compile(rb"\[\n *[0-9]+(,\n *[0-9]+)*\n *\]")
_BREAK = re.compile(rb"\n *")


def seal(manifest: Manifest) -> Manifest:
    """The manifest with its digest filled in: the sha256 of its canonical JSON with an empty
    digest.

    It covers the tars, but not the checksums of tables, which follow from the bytes of indexes:
    other versions of Arrow write others for the same set.
    """
    splits = {
        name: msgspec.structs.replace(
            split,
            shards=StoredShards(
                [msgspec.structs.replace(group, table_crc32c="") for group in split.groups]
            ),
        )
        for name, split in manifest.splits.items()
    }
    blank = msgspec.structs.replace(manifest, digest="", splits=splits)
    digest = hashlib.sha256(_encode(blank)).hexdigest()
    return msgspec.structs.replace(manifest, digest=digest)


def to_json(manifest: Manifest) -> bytes:
    """Canonical, readable JSON with a final newline; `parse` gives the same manifest back."""
    text = msgspec.json.format(_encode(manifest), indent=1)
    # A line for each of thousands of class totals would be most of the file. No string holds a
    # newline.
    lists = _NUMBERS.sub(
        lambda match: _BREAK.sub(b" ", match[0]).replace(b"[ ", b"[").replace(b" ]", b"]"), text
    )
    return lists + b"\n"


def parse(data: bytes, where: str = naming.MANIFEST) -> Manifest:
    """A checked Manifest from JSON; raises ManifestError with one sentence on what is wrong.

    Its shards can be read only once it is `opened`.
    """
    try:
        manifest = msgspec.json.decode(data, type=Manifest, dec_hook=shards_of)
        check(manifest, where)
    except msgspec.ValidationError as error:
        raise ManifestError(
            f"{where}: {error}; expected a shardset manifest of version {VERSION}: restore or"
            " rebuild the shard set, or upgrade shardset if a newer one wrote it"
        ) from error
    except JSON_ERRORS as error:
        raise ManifestError(
            f"{where}: not valid JSON ({error}); the file is damaged, restore or rebuild it"
        ) from error
    return manifest


def check(manifest: Manifest, where: str = naming.MANIFEST) -> None:
    """Raises ManifestError unless counts add up, paths stay inside, labels are 0..n-1 and the
    digest fits.
    """
    for problem in _problems(manifest, where):
        raise ManifestError(f"{problem}; restore or rebuild the shard set")
    if seal(manifest).digest != manifest.digest:
        raise ManifestError(
            f"{where}: the content does not fit its digest {manifest.digest[:12]}…; restore or"
            " rebuild the shard set"
        )


def _encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest, order="sorted", enc_hook=attrgetter("groups"))


def shards_of(kind: type, groups: Any) -> StoredShards:
    """The shards of a split from the groups in the file."""
    try:
        return StoredShards(msgspec.convert(groups, list[Group]))
    except msgspec.ValidationError as error:
        where = "at `$.splits[...].groups"  # msgspec knows only the rest
        raise msgspec.ValidationError(str(error).replace("at `$", where)) from error


def _problems(manifest: Manifest, where: str) -> Iterator[str]:
    """The faults of a manifest's file, in words; `where` begins each sentence."""
    num_classes = len(manifest.classes)
    if [info.label for info in manifest.classes] != list(range(num_classes)):
        yield f"{where}: class labels are not 0 to {num_classes - 1} in order"
    for name, split in manifest.splits.items():
        if not naming.is_split(name):
            yield f"{where}: {name!r} can't name a split ({naming.SPLIT_NAMES})"
        yield from _split_problems(split, num_classes, f"{where}: split {name!r}")
    paths = [path for group in manifest.groups for path in (group.shards, group.table)]
    for path, count in Counter([manifest.quarantine.path, *paths]).items():
        if not naming.is_relative(path):
            yield f"{where}: path {path!r} leaves the manifest's folder, expected one inside it"
        if count > 1:
            yield f"{where}: path {path!r} is listed twice"


def _split_problems(split: Split, num_classes: int, where: str) -> Iterator[str]:
    is_unique = len(set(split.fields)) == len(split.fields) > 0
    if not is_unique or not all(map(naming.is_field, split.fields)):
        yield f"{where}: fields {split.fields} can't be a sample's"
    if len(split.class_totals) != num_classes:
        yield f"{where}: {len(split.class_totals)} class totals for {num_classes} classes"
    if (num_labelled := sum(split.class_totals)) > split.num_samples:
        yield (
            f"{where}: class totals add up to {num_labelled}, but it holds {split.num_samples}"
            " samples"
        )
    for group in split.groups:
        if group.num_shards != group.num_named:
            yield (
                f"{where}: {group.shards!r} names {group.num_named} shards, expected"
                f" {group.num_shards}"
            )
        if group.num_samples < group.num_shards:
            yield f"{where}: {group.num_samples} samples don't fill {group.num_shards} shards"
    if (
        split.num_samples != (num_samples := sum(group.num_samples for group in split.groups))
        or not num_samples
    ):
        yield f"{where}: num_samples is {split.num_samples} but its groups hold {num_samples}"
    expected = split.num_source_samples - split.num_dropped + split.num_repeats
    if split.num_samples != expected:
        terms = (
            f"{split.num_source_samples} source samples, {split.num_dropped} dropped and"
            f" {split.num_repeats} repeats"
        )
        yield f"{where}: {terms} make {expected}, but num_samples is {split.num_samples}"
