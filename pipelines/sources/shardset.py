"""A shard set, or a view of one, as the input of a build: its samples with their fields, keys and classes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import msgspec
import numpy as np

from pipelines.sources.base import RawSample, Rejected, Spool, Survey, Unit
from pipelines.sources.webdataset import known_tars, samples_of
from shardset.errors import SourceError
from shardset.format import manifest as manifests
from shardset.format.manifest import LoadedSet
from shardset.storage.base import Stat, Storage


@lru_cache(maxsize=1)
def load_in_worker(url: str, digest: str) -> LoadedSet:
    """The set or view of a unit, opened once in a process; raises SourceError if another one is there now."""
    loaded = manifests.load(url)
    if digest != _digest(loaded):
        raise SourceError(f"{url}: was replaced while it was read; start the build again")
    return loaded


@dataclass(frozen=True, slots=True)
class ShardSet:
    """The samples of a set or a view, by its address; those of a view with its splits and labels. A unit per tar."""

    url: str
    input: Storage

    name: ClassVar[str] = "shardset"

    def survey(self) -> Survey:
        """The tars that hold samples; raises SourceError for a set whose tars are not there."""
        loaded = manifests.load(self.url)
        tars, units = {tar.name: tar for tar in known_tars(loaded.storage, loaded.whole)}, []
        for name, split in loaded.manifest.splits.items():
            part = loaded.part(name)
            for shard in split.shards:
                ids = np.array([shard.first_id, shard.first_id + shard.num_samples])
                if part is None or np.diff(part.selection.num_before(ids)) > 0:
                    tar = msgspec.to_builtins(tars[shard.path])
                    units.append({"tar": tar, "split": name, "first_id": shard.first_id, "of": _digest(loaded)})
        notes = [] if loaded.view is None else [f"a view of {loaded.whole.digest}: {loaded.view.head.reason}".strip()]
        read = dict.fromkeys(unit["tar"]["name"] for unit in units)
        objects = {name: tars[name].num_bytes for name in read}
        return Survey(units=units, classes=loaded.manifest.classes or None, notes=notes, objects=objects)

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The samples of a tar that the set or view takes, in its order."""
        part = load_in_worker(self.url, unit["of"]).part(unit["split"])
        for id_, sample in enumerate(samples_of(self.input, Stat(**unit["tar"]), unit["split"]), unit["first_id"]):
            if part is None:
                yield sample
            elif part.selection.has(ids := np.array([id_])).item():
                stored = np.array([getattr(sample, "label", -1)])
                yield _relabelled(sample, part.labels_of(ids, stored).item()) if part.labels is not None else sample


def open_shard_set(url: str) -> ShardSet:
    """The source of an address."""
    return ShardSet(url, manifests.load(url).storage)


def _digest(loaded: LoadedSet) -> str:
    return loaded.manifest.digest if loaded.view is None else loaded.view.digest


def _relabelled(sample: RawSample | Rejected, label: int) -> RawSample | Rejected:
    if isinstance(sample, Rejected):
        return sample
    fields = {name: content for name, content in sample.fields.items() if name != "cls"}
    if label >= 0 and "cls" in sample.fields:
        fields = {name: b"%d" % label if name == "cls" else content for name, content in sample.fields.items()}
    return msgspec.structs.replace(sample, label=label, fields=fields)
