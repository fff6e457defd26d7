"""Opens a set: its newest version, an older one, or a view of it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from shardset.errors import ConfigError, ManifestError, MissingSet, NotFound
from shardset.format import naming, versions
from shardset.format.manifest.records import Manifest
from shardset.format.manifest.sealing import parse
from shardset.format.shards import StoredShards
from shardset.format.view import ViewHead, ViewRows, ViewSplit, address_from, read_view, view_digest
from shardset.order.selection import Selection
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice
from shardset.storage.open import is_web, open_file, open_storage


@dataclass(frozen=True, eq=False, kw_only=True)
class View:
    """A view of a set: what it says of itself, its splits, and the manifest of the whole set."""

    head: ViewHead
    splits: Mapping[str, ViewSplit]
    whole: Manifest


class LoadedSet(NamedTuple):
    """A manifest and the storage that its paths are relative to: read once and handed on.

    Give it to `Stream` or `open` in place of the address. With a view, `manifest` has the view's
    splits. Each has the shards and totals of the complete split that it is of.

    Attributes:
        manifest: The Manifest.
        storage: The Storage of the set's folder.
        view: The view that was loaded: its head, its splits and the manifest of the complete set.
            None without one.
    """

    manifest: Manifest
    storage: Storage
    view: View | None = None

    def without_view(self) -> "LoadedSet":
        """The complete set that a view is of; itself without a view.

        Returns:
            A LoadedSet whose `view` is None.
        """
        return self if self.view is None else LoadedSet(self.view.whole, self.storage)

    @property
    def digest(self) -> str:
        """The digest of the view, or of the complete set."""
        return self.manifest.digest if self.view is None else self.view.head.digest

    def part(self, split: str) -> ViewSplit:
        """The samples that the view has of a split; all of them without a view.

        Args:
            split: The name of the split.

        Raises:
            ManifestError: There is no such split.
        """
        whole = ViewSplit(Selection(self.manifest.split(split).num_samples))
        return whole if self.view is None else self.view.splits.get(split, whole)

    def stored_split(self, split: str) -> str:
        """The name of the split in the complete set that a split is of.

        Args:
            split: The name of the split, perhaps in the view.
        """
        return split if self.view is None or split not in self.view.splits else self.view.head.split


SetUrl = str | os.PathLike[str] | LoadedSet
"""A manifest or its folder, a view, or the set that `shardset.load` returned."""


def load_set(url: SetUrl) -> LoadedSet:
    """The set at a URL; that itself if it is loaded already."""
    return url if isinstance(url, LoadedSet) else load(url)


def load(url: str | os.PathLike[str]) -> LoadedSet:
    """Reads the manifest of a set; no shard and no index.

    Args:
        url: The folder of the set or its manifest; `FOLDER@TAG` or `FOLDER@NUMBER` for an older
            version, unless a folder of that very name holds a file; or a view (`.parquet`).

    Returns:
        The manifest and the storage of its folder.

    Raises:
        ManifestError: There is no complete set, no such version, or the manifest is damaged.
        ConfigError: The address has a form that is not known, or a view does not fit its set.
        StorageError: The storage refused or failed.

    Examples:
        >>> import shardset
        >>> loaded = shardset.load("shards")
        >>> split = loaded.manifest.split("train")
        >>> split.num_samples, len(split.shards), split.shards[0].path
        (20, 2, 'train/train-000000.tar')
        >>> stream = shardset.Stream(loaded, "train", batch_size=8, image_size=32)
    """
    url = os.fspath(url)
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
        if versioned and (is_web(url) or not any(True for _ in open_storage(url).list())):
            return _load_version(*versioned)
        raise MissingSet(
            f"{target}: no manifest there, so no finished shard set; build one with"
            " `shardset build`"
        ) from error


def _load_version(url: str, version: str) -> LoadedSet:
    try:
        newest = load_whole(url)
    except MissingSet as error:
        raise MissingSet(
            f"{url}@{version}: no such folder; and as version {version!r} of {url}: {error}"
        ) from error
    storage, manifest = newest.storage, newest.manifest
    number, digest = versions.resolve(storage, version)
    if number < manifest.number:  # each was stored before the next one was published
        try:
            manifest = read(storage, versions.path(number))
        except NotFound as error:
            raise MissingSet(
                f"{url}: version {number} was removed; `shardset log {url}` lists those"
                " that are left"
            ) from error
    if manifest.number != number or digest not in (None, manifest.digest):
        raise MissingSet(
            f"{url}: has no version {version}; `shardset log {url}` lists those that it has"
        )
    return LoadedSet(manifest, storage)


def load_whole(url: str) -> LoadedSet:
    """The set at `url`; raises ConfigError for a view, which has no files."""
    loaded = load(url)
    if loaded.view is not None:
        raise ConfigError(
            f"{url}: a view has no shards; name its set, or make the view one with"
            " `shardset build --source shardset`"
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
    stored = whole.split(head.split)
    others = {name: split for name, split in whole.splits.items() if name != head.split}
    if taken := rows.keys() & others.keys():
        raise ConfigError(
            f"{url}: the set has a split {min(taken)!r} already; give the view's another name"
        )
    bounds = ("ids", 0, stored.num_samples), ("labels", -1, len(whole.classes))
    for part in rows.values():
        for (what, least, end), numbers in zip(bounds, part, strict=False):
            if numbers is not None and not least <= numbers.min() <= numbers.max() < end:
                raise ConfigError(
                    f"{url}: {what} reach {numbers.min()} to {numbers.max()}, expected {least} to"
                    f" {end - 1}"
                )
    head = msgspec.structs.replace(head, digest=head.digest or view_digest(whole.digest, rows))
    splits = {
        name: ViewSplit(Selection.from_kept(ids, stored.num_samples, head.digest), labels, weights)
        for name, (ids, labels, weights) in rows.items()
    }
    manifest = msgspec.structs.replace(whole, splits=dict.fromkeys(splits, stored) | others)
    return LoadedSet(manifest, loaded.storage, View(head=head, splits=splits, whole=whole))


def _load_view(url: str) -> LoadedSet:
    storage, name = open_file(url)
    head, rows = read_view(storage, name)
    if head is None:
        raise ConfigError(
            f"{url}: names no set in its footer; seal it with `shardset view OUT --of"
            f" SET --ids {url}`"
        )
    if head.parent.endswith(".parquet"):
        raise ConfigError(
            f"{url}: names {head.parent!r}, a view, as its set; make it a view of the set itself"
        )
    whole = load_whole(address_from(storage.url, head.parent))
    if whole.digest != head.parent_digest:  # of an older version, if that is left
        older = older_with(whole.storage, head.parent_digest) or whole.manifest
        whole = LoadedSet(opened(whole.storage, older), whole.storage)
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
    if is_web(storage.url):  # which lists nothing, but these names are known
        numbers = [*range(1, read_head(storage).number)]
    else:
        listed = (versions.number_of(stat.name) for stat in storage.list(versions.FOLDER))
        numbers = sorted(filter(None, listed))
    for number in reversed(numbers):
        with suppress(NotFound):  # of a version that `compact` removed
            yield read_head(storage, versions.path(number))


def older_with(storage: Storage, digest: str) -> Manifest | None:
    """The older version with that digest, its shards unread; None if it's gone."""
    return next((version for version in older(storage) if version.digest == digest), None)


def opened(storage: Storage, manifest: Manifest) -> Manifest:
    """A parsed manifest with its shards.

    Reads the tables of unequal shards; raises ManifestError.
    """
    splits = {
        name: msgspec.structs.replace(split, shards=StoredShards(split.groups, storage))
        for name, split in manifest.splits.items()
    }
    return msgspec.structs.replace(manifest, splits=splits)
