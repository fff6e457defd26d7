"""The manifest of a shard set: its records, what they must say about each other, and its JSON.

`docs/reference/format.md` explains each field; `docs/manifest.schema.json` is for programs.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from shardset.errors import ConfigError, ManifestError, NotFound
from shardset.format import naming, versions
from shardset.format.shards import Count, Group, Positive, Record, Sha256, StoredShards
from shardset.format.shards import IndexFile as IndexFile
from shardset.format.shards import Shard as Shard
from shardset.format.view import ViewHead, ViewRows, ViewSplit, address_from, read_view, view_digest
from shardset.order.permutation import hash_text
from shardset.order.selection import Selection
from shardset.prepared import JSON_ERRORS, prepared
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice
from shardset.storage.open import open_file, open_storage

KIND: Final = "shardset"
VERSION: Final = 1

_NUMBERS = re.compile(rb"\[\n *[0-9]+(,\n *[0-9]+)*\n *\]")
_BREAK = re.compile(rb"\n *")


class ClassInfo(Record, frozen=True, kw_only=True):
    """One class: its 0-based label, its name, and its WordNet id if it has one."""

    label: Count
    name: str
    wnid: str | None = None


class Split(Record, frozen=True, kw_only=True):
    """All shards of one split, in id order.

    `fields` are all that occur, in the order of the index's columns.

    `shards` makes each shard when it is asked for; in the file they are `groups`. `class_totals`
    has the samples of each class, by label.
    """

    num_samples: Count
    num_source_samples: Count
    num_dropped: Count
    num_repeats: Count
    num_content_bytes: Count
    num_tar_bytes: Count
    max_tar_bytes: Count
    max_index_bytes: Count
    fields: list[str]
    class_totals: list[Count]
    shards: StoredShards = msgspec.field(name="groups")

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of shards, whether their tables can be read or not."""
        return self.shards.groups

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return sum(group.num_shards for group in self.groups)

    @property
    def mean_bytes(self) -> float:
        """Mean content bytes of a sample, over all its fields and without tar headers."""
        return self.num_content_bytes / max(1, self.num_samples)

    @property
    def shard_sizes(self) -> list[int]:
        """The samples of each shard."""
        sizes: list[int] = self.shards.sizes.tolist()
        return sizes

    def index_fields(self, shard: int) -> Sequence[str]:
        """The fields in the index of a shard: those of its group, which may lack some that came to
        the split later.
        """
        return self.shards.group_of(shard).fields or self.fields

    def load(self, shards: Sequence[int]) -> None:
        """Reads the table rows of some shards at the same time, before they are asked for one by
        one.
        """
        self.shards.load(np.array(shards, np.int64))


class Quarantine(Record, frozen=True, kw_only=True):
    """How many raw samples were rejected, and the file that lists them with their reasons."""

    count: Count
    path: str


class Provenance(Record, frozen=True, kw_only=True):
    """Where the set comes from.

    Nothing here depends on when, where or on how many machines it was built.

    `appended` says the same of each append, in order.
    """

    tool: str
    source: str
    source_digest: Sha256
    options: dict[str, Any]
    libraries: dict[str, str]
    notes: list[str]
    appended: "list[Provenance]" = msgspec.field(default_factory=list)


@prepared
class Manifest(Record, frozen=True, kw_only=True):
    """A shard set. Present means complete: it is written after everything it lists.

    `version` is that of the format, `number` that of the set: a build makes 1, and each change adds
    one. `forgotten` has a hash of each key that a compaction dropped.
    """

    kind: Literal["shardset"]
    version: Literal[1]
    digest: Sha256
    number: Positive = 1
    classes: list[ClassInfo]
    splits: dict[str, Split]
    quarantine: Quarantine
    fixes: dict[str, Count]
    provenance: Provenance
    forgotten: list[Count] = msgspec.field(default_factory=list)

    def class_name(self, label: int) -> str:
        """The name of the class with that label; "" if there is none."""
        return self.classes[label].name if 0 <= label < len(self.classes) else ""

    @property
    def is_own(self) -> bool:
        """Whether shardset wrote all tars; others wrote those that were adopted."""
        return all(group.is_own for group in self.groups)

    @property
    def groups(self) -> list[Group]:
        """The groups of all splits."""
        return [group for split in self.splits.values() for group in split.groups]

    @property
    def shards(self) -> Iterator[Shard]:
        """The shards of all splits, once it is `opened`."""
        return (shard for split in self.splits.values() for shard in split.shards)

    @property
    def seed(self) -> int:
        """The seed of the order in which the build stored the samples; of the first one, if shards
        were added.
        """
        return next(iter(self.splits.values())).groups[0].seed

    def split(self, name: str) -> Split:
        """The split of that name; raises ManifestError naming those that exist."""
        if name not in self.splits:
            raise ManifestError(
                f"no split {name!r} in this shard set; it has {', '.join(sorted(self.splits))}"
            )
        return self.splits[name]


def hash_of_key(key: str) -> int:
    """What is left of a forgotten key: 32 bits, which tell it from a mistyped one."""
    return hash_text(key, key=0) >> 32


def seal(manifest: Manifest) -> Manifest:
    """The manifest with its digest filled in: the sha256 of its canonical JSON with an empty
    digest.
    """
    blank = msgspec.structs.replace(manifest, digest="")
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


@dataclass(frozen=True, eq=False, kw_only=True)
class View:
    """A view of a set: what it says of itself, its splits, and the manifest of the whole set."""

    head: ViewHead
    splits: Mapping[str, ViewSplit]
    whole: Manifest


class LoadedSet(NamedTuple):
    """A manifest and the storage that its paths are relative to: read once and handed on.

    With a view, `manifest` has the view's splits. Each has the shards and totals of the whole split
    that it is of.
    """

    manifest: Manifest
    storage: Storage
    view: View | None = None

    def without_view(self) -> "LoadedSet":
        """The whole set."""
        return self if self.view is None else LoadedSet(self.view.whole, self.storage)

    @property
    def digest(self) -> str:
        """The digest of the view, or that of the whole set."""
        return self.manifest.digest if self.view is None else self.view.head.digest

    def part(self, split: str) -> ViewSplit:
        """What the view takes of a split; all of it without one."""
        whole = ViewSplit(Selection(self.manifest.split(split).num_samples))
        return whole if self.view is None else self.view.splits.get(split, whole)

    def stored_split(self, split: str) -> str:
        """The split of the whole set that a split is of."""
        return split if self.view is None or split not in self.view.splits else self.view.head.split


SetUrl = str | os.PathLike[str] | LoadedSet
"""A manifest or its folder, a view, or the set that `shardset.load` returned."""


def load_set(url: SetUrl) -> LoadedSet:
    """The set at a URL; that itself if it is loaded already."""
    return url if isinstance(url, LoadedSet) else load(os.fspath(url))


def load(url: str) -> LoadedSet:
    """The manifest at `url` (the file or its folder) and the storage that its paths are relative
    to.

    For a `.parquet`, the view in it and the set that it is of. `URL@TAG` and `URL@N` are an older
    version of the set in a folder, unless a folder of that very name holds any file. Raises
    ManifestError if there is no such set or version.
    """
    if url.endswith(".parquet"):
        return _load_view(url)
    storage, name = (
        open_file(url) if url.endswith(".json") else (open_storage(url), naming.MANIFEST)
    )
    target = url if url.endswith(".json") else f"{url.rstrip('/')}/{name}"
    try:
        return LoadedSet(read(storage, name, target), storage)
    except NotFound as error:
        versioned = versions.split_address(url)
        # A web server lists nothing.
        if versioned and (
            url.startswith("https://") or not any(True for _ in open_storage(url).list())
        ):
            return _load_version(*versioned)
        raise ManifestError(
            f"{target}: no manifest there, so no finished shard set; build one with `python -m"
            " pipelines build`"
        ) from error


def _load_version(url: str, version: str) -> LoadedSet:
    try:
        newest = load_whole(url)
    except ManifestError as error:
        raise ManifestError(
            f"{url}@{version}: no such folder; and as version {version!r} of {url}: {error}"
        ) from error
    storage, found = newest.storage, newest.manifest
    number, digest = versions.resolve(storage, version)
    if number < found.number:  # each was stored before the next one was published
        try:
            found = read(storage, versions.path(number))
        except NotFound as error:
            raise ManifestError(
                f"{url}: version {number} was removed; `python -m pipelines log {url}` lists those"
                " that are left"
            ) from error
    if found.number != number or digest not in (None, found.digest):
        raise ManifestError(
            f"{url}: has no version {version}; `python -m pipelines log {url}` lists those that"
            " it has"
        )
    return LoadedSet(found, storage)


def load_whole(url: str) -> LoadedSet:
    """The set at `url`; raises ConfigError for a view, which has no files of its own."""
    loaded = load(url)
    if loaded.view is not None:
        raise ConfigError(
            f"{url}: a view has no shards of its own; name its set, or make the view one with"
            " `python -m pipelines build --source shardset`"
        )
    return loaded


def with_view(
    loaded: LoadedSet, head: ViewHead, rows: Mapping[str, ViewRows], url: str
) -> LoadedSet:
    """A whole set with a view of it; raises ConfigError where the view does not fit."""
    whole = loaded.manifest
    if head.parent_digest != whole.digest:
        raise ConfigError(
            f"{url}: is a view of the set with digest {head.parent_digest[:12]}…, but"
            f" {loaded.storage.url} has {whole.digest[:12]}…; name that set, or make the view again"
        )
    of, others = (
        whole.split(head.split),
        {name: one for name, one in whole.splits.items() if name != head.split},
    )
    if taken := rows.keys() & others.keys():
        raise ConfigError(
            f"{url}: the set has a split {min(taken)!r} already; give that of the view another name"
        )
    bounds = ("ids", 0, of.num_samples), ("labels", -1, len(whole.classes))
    for part in rows.values():
        for (what, least, end), found in zip(bounds, part, strict=False):
            if found is not None and not least <= found.min() <= found.max() < end:
                raise ConfigError(
                    f"{url}: {what} reach {found.min()} to {found.max()}, expected {least} to"
                    f" {end - 1}"
                )
    head = msgspec.structs.replace(head, digest=head.digest or view_digest(whole.digest, rows))
    splits = {
        name: ViewSplit(Selection.of(ids, of.num_samples, head.digest), labels, weights)
        for name, (ids, labels, weights) in rows.items()
    }
    manifest = msgspec.structs.replace(whole, splits=dict.fromkeys(splits, of) | others)
    return LoadedSet(manifest, loaded.storage, View(head=head, splits=splits, whole=whole))


def _load_view(url: str) -> LoadedSet:
    storage, name = open_file(url)
    head, rows = read_view(storage, name)
    if head is None:
        raise ConfigError(
            f"{url}: names no set in its footer; seal it with `python -m pipelines view OUT --of"
            f" SET --ids {url}`"
        )
    if head.parent.endswith(".parquet"):
        raise ConfigError(
            f"{url}: names {head.parent!r}, a view, as its set; make it a view of the set itself"
        )
    whole = load_whole(address_from(storage.url, head.parent))
    if whole.digest != head.parent_digest:  # of an older version, if that is left
        found = older_with(whole.storage, head.parent_digest) or whole.manifest
        whole = LoadedSet(opened(whole.storage, found), whole.storage)
    return with_view(whole, head, rows, url)


def read(storage: Storage, name: str = naming.MANIFEST, where: str | None = None) -> Manifest:
    """The manifest of that name, with its shards; raises NotFound, or ManifestError for damage that
    two reads found.
    """
    return opened(storage, read_head(storage, name, where))


def read_head(storage: Storage, name: str = naming.MANIFEST, where: str | None = None) -> Manifest:
    """The manifest of that name, as `parse` returns it: no table of shards is read.

    Raises as `read` does.
    """
    where = where or f"{storage.url}/{name}"
    return read_twice(lambda: parse(storage.read(name), where), error=ManifestError)


def older(storage: Storage) -> Iterator[Manifest]:
    """The manifests of the older versions, as `read_head` returns them, the newest first: stop once
    you know enough.
    """
    numbers = filter(
        None, (versions.number_of(stat.name) for stat in storage.list(versions.FOLDER))
    )
    for number in sorted(numbers, reverse=True):
        yield read_head(storage, versions.path(number))


def older_with(storage: Storage, digest: str) -> Manifest | None:
    """The older version with that digest, its shards unread; None if it's gone or on the web."""
    found = () if storage.url.startswith("https://") else older(storage)
    return next((one for one in found if one.digest == digest), None)


def opened(storage: Storage, manifest: Manifest) -> Manifest:
    """A parsed manifest with its shards.

    Reads the tables of unequal shards; raises ManifestError.
    """
    splits = {
        name: msgspec.structs.replace(split, shards=StoredShards(split.groups, storage))
        for name, split in manifest.splits.items()
    }
    return msgspec.structs.replace(manifest, splits=splits)


def files_of(*named_by: Manifest) -> set[str]:
    """The paths of all files that some manifests name; reads none."""
    groups = [group for manifest in named_by for group in manifest.groups]
    tars = [group.path(number) for group in groups for number in range(group.num_shards)]
    lists = {manifest.quarantine.path for manifest in named_by}
    return lists.union((group.table for group in groups), tars, map(naming.index_path, tars))


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
    """What is wrong with the file of a manifest, in words; `where` begins each sentence."""
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
        yield f"{where}: fields {split.fields} can't be those of a sample"
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
        if not set(group.fields) <= set(split.fields):
            yield (
                f"{where}: {group.shards!r} has the fields {group.fields}, expected some of"
                f" {split.fields}"
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
