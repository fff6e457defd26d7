"""A shard set, or a view of one, as the input of a build: its samples with their fields, keys and
classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import asdict, replace

from pipelines.sources.base import Extent, RawSample, Spool, Survey, Unit
from pipelines.sources.webdataset import LOOKED_FOR, tar_sample, tars_named
from shardset.errors import SourceError
from shardset.format import manifest as manifests
from shardset.format.images import is_image_field
from shardset.format.manifest import LoadedSet, Manifest
from shardset.format.rows import members_of
from shardset.read.query import samples_of_shard, shards_of
from shardset.storage.base import Stat, Storage


@lru_cache(maxsize=1)
def load_in_worker(url: str, digest: str) -> LoadedSet:
    """The set or view of a unit, opened once in a process; raises SourceError if another one is
    there now.
    """
    loaded = manifests.load(url)
    if digest != loaded.digest:
        raise SourceError(f"{url}: was replaced while it was read; start again")
    return loaded


@dataclass(frozen=True, slots=True)
class ExistingSet:
    """The samples of a set or a view, by its address; a view's with its splits and labels.

    A unit per tar.
    """

    url: str
    input: Storage

    def survey(self) -> Survey:
        """The tars that hold samples; raises SourceError for a set whose tars are not there."""
        loaded = manifests.load(self.url)
        whole = loaded.without_view().manifest
        tars = _tars(loaded.storage, whole)
        units: list[Unit] = []
        for name, split in loaded.manifest.splits.items():
            for number in shards_of(loaded, name):
                tar = asdict(tars[split.shards[number].path])
                units.append({"tar": tar, "split": name, "shard": number, "digest": loaded.digest})
        notes = []
        if loaded.view is not None:
            notes.append(f"made of a view of {whole.digest}: {loaded.view.head.reason}")
        objects = {unit["tar"]["name"]: unit["tar"]["num_bytes"] for unit in units}
        return Survey(
            units=units,
            classes=whole.classes or None,
            splits=loaded.manifest.splits,
            notes=notes,
            objects=objects,
            looked_for=LOOKED_FOR,
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample]:
        """The samples of a tar that the set or view takes, in its order, by its index."""
        loaded, split = load_in_worker(self.url, unit["digest"]), unit["split"]
        tar, rows = Stat(**unit["tar"]), samples_of_shard(loaded, split, None, unit["shard"])
        facts = (rows[name].to_pylist() for name in ("key", "label", "image_crc32c"))
        for key, label, crc32c, members in zip(*facts, members_of(rows), strict=True):
            extents = {
                field: Extent(tar.name, tar.generation, start, stop - start)
                for start, stop, field in members
            }
            if first := next(filter(is_image_field, extents), ""):
                extents[first] = replace(extents[first], crc32c=crc32c)
            # a view may have another label, or none
            yield tar_sample(tar.name, split, key, label, {**extents})


def _tars(storage: Storage, manifest: Manifest) -> dict[str, Stat]:
    """The tars of a set by name; raises SourceError for those that are missing or of another
    size.
    """
    sizes = {shard.path: shard.num_bytes for shard in manifest.shards}
    tars = {tar.name: tar for tar in tars_named(storage, sizes)}
    for name, tar in tars.items():
        if tar.num_bytes != sizes[name]:
            raise SourceError(
                f"{storage.url}/{name}: {tar.num_bytes} bytes, its manifest says {sizes[name]};"
                " fetch the shard set again"
            )
    return tars
