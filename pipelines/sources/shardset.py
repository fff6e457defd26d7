"""A shard set, or a view of one, as the input of a build: its samples with their fields, keys and
classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from msgspec.structs import asdict, replace

from pipelines.sources.base import RawSample, Rejected, Spool, Survey, Unit
from pipelines.sources.webdataset import LOOKED_FOR, samples_of, tars_named
from shardset.errors import SourceError
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet, Manifest
from shardset.storage.base import Stat, Storage


@lru_cache(maxsize=1)
def load_in_worker(url: str, digest: str) -> LoadedSet:
    """The set or view of a unit, opened once in a process; raises SourceError if another one is
    there now.
    """
    loaded = manifests.load(url)
    if digest != loaded.digest:
        raise SourceError(f"{url}: was replaced while it was read; start the build again")
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
            in_shards = np.diff(
                loaded.part(name).selection.num_before(np.cumsum([0, *split.shard_sizes]))
            )
            units += [
                {
                    "tar": asdict(tars[shard.path]),
                    "split": name,
                    "first_id": shard.first_id,
                    "digest": loaded.digest,
                }
                for shard, num_samples in zip(split.shards, in_shards.tolist(), strict=True)
                if num_samples
            ]
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

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The samples of a tar that the set or view takes, in its order."""
        part = load_in_worker(self.url, unit["digest"]).part(unit["split"])
        for id_, sample in enumerate(
            samples_of(self.input, Stat(**unit["tar"]), unit["split"], spool), unit["first_id"]
        ):
            ids = np.array([id_])
            if not part.selection.has(ids).item():
                continue
            if isinstance(sample, RawSample) and part.labels is not None:
                label = part.labels_of(ids, np.array([sample.label])).item()
                # the build adds it
                fields = {name: value for name, value in sample.fields.items() if name != "cls"}
                sample = replace(sample, label=label, fields=fields)
            yield sample


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
