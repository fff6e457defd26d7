"""The part of a set that an appending build needs: the labels of its classes, and its keys."""

import threading
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipelines.config import Known
from pipelines.plan import paths, tables
from pipelines.plan.files import PlanFiles, in_order
from pipelines.plan.tables import UnitRow
from pipelines.sources.base import RawSample, Rejected, joined_classes
from shardset.errors import SourceError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.labels import NO_LABEL
from shardset.format.manifest import ClassInfo, Manifest, Shard
from shardset.format.originals import Origin, stored_key
from shardset.read.indexes import read_index

Hashes = NDArray[np.uint64]

_reading = threading.Lock()
_read: dict[str, Hashes] = {}
"""The files that this process has read, by build: a runner may have a dozen threads."""


class Addition(msgspec.Struct, frozen=True, kw_only=True):
    """How a build appends to the version of a set that has the digest `base`.

    `labels` has the label in the set of each class of the input, and is empty where all stay the
    same. `categories` has the ids in the set of categories that the input numbers otherwise. The
    version has `num_classes`. `num_source_samples` are the version's, by split.
    `known` says which samples of the input to skip.
    """

    base: str
    labels: list[int]
    categories: dict[int, int]
    num_classes: int
    num_source_samples: dict[str, int]
    known: Known


def base_of(files: PlanFiles, addition: Addition | None) -> Manifest | None:
    """The version to which a build appends."""
    if addition is None:
        return None
    return manifests.parse(bytes(files.read(paths.BASE)), f"{files.output.url}/{paths.BASE}")


def extended_classes(
    old: Sequence[ClassInfo], new: Sequence[ClassInfo] | None
) -> tuple[Sequence[ClassInfo] | None, list[int], dict[int, int]]:
    """The classes of a set and of an input together, and the input's labels and categories, as in
    `Addition`.

    Without names of the input its labels mean the classes of the set, and may go beyond them if
    those have no names either.
    """
    if new is None and are_numbers(old):
        return None, [], {}
    if new is None or (are_numbers(new) and not are_numbers(old)):
        return old, [], {}
    classes, labels, ids = joined_classes(old, new)
    same = labels == [*range(len(labels))]
    return classes, [] if same else labels, {own: id_ for own, id_ in ids.items() if own != id_}


def relabelled(
    sample: RawSample | Rejected, labels: Sequence[int], num_classes: int
) -> RawSample | Rejected:
    """A sample of the input with its label in the set; Rejected if that is no class."""
    if isinstance(sample, Rejected):
        return sample
    num_classes = len(labels) or num_classes
    if not NO_LABEL <= sample.label < num_classes:
        reason = f"label {sample.label}, expected 0 to {num_classes - 1}"
        return Rejected(name=sample.name, split=sample.split, reason=reason)
    if not labels or sample.label == NO_LABEL:
        return sample
    label = labels[sample.label]
    fields = sample.fields | ({"cls": b"%d" % label} if "cls" in sample.fields else {})
    return msgspec.structs.replace(sample, label=label, fields=fields)


def write_known(files: PlanFiles, base: Manifest) -> None:
    """Writes the hashes of all keys of a version, from its indexes."""
    output, opened = files.output, manifests.opened(files.output, base)

    def hashes(shard: Shard) -> Hashes:
        return tables.hash_keys(read_index(output, shard)["key"].astype(str).tolist())

    found = np.concatenate([*in_order(output, opened.shards, hashes)])
    files.write(paths.KNOWN_KEYS, np.unique(found).tobytes())


def known(
    files: PlanFiles, addition: Addition, samples: Sequence[RawSample | Rejected | UnitRow]
) -> NDArray[np.bool_]:
    """Whether the set has the key of each sample, or the short one made of it in any split."""
    keys = [
        "" if isinstance(one, Rejected) else stored_key(Origin(split, one.name, one.key, ""), 0, 0)
        for one in samples
        for split in addition.num_source_samples
    ]
    taken = _taken(files, keys).reshape(len(samples), len(addition.num_source_samples))
    return np.asarray(taken.any(axis=1))


def renamed(files: PlanFiles, addition: Addition, rows: Sequence[UnitRow]) -> list[UnitRow]:
    """The rows of a unit; one whose key the set has gets a new one, as a duplicate key does."""
    is_known = zip(rows, known(files, addition, rows), strict=True)
    return [_renamed(row, addition.base) if taken else row for row, taken in is_known]


def refuse_known_key(files: PlanFiles, row: UnitRow, key: str) -> None:
    """Raises SourceError if the set has the key that a sample got because another one of the input
    has its own.
    """
    if _taken(files, [key]).any():
        raise SourceError(
            f"{row.name}: several samples want its key {row.key!r}, and the set has {key!r};"
            " rename it"
        )


def are_numbers(classes: Sequence[ClassInfo]) -> bool:
    """Whether the classes have no names but their labels."""
    return all(info.name == str(info.label) for info in classes)


def _renamed(row: UnitRow, base: str) -> UnitRow:
    key = naming.short_key(f"{base}/{row.split}/{row.name}\0{row.key}")
    return msgspec.structs.replace(row, key=key)


def _taken(files: PlanFiles, keys: Sequence[str]) -> NDArray[np.bool_]:
    """Whether the set has each of these keys."""
    with _reading:
        if files.build not in _read:
            _read[files.build] = np.frombuffer(files.read(paths.KNOWN_KEYS), np.uint64)
    known, hashes = _read[files.build], tables.hash_keys(keys)
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return np.equal(known[places], hashes)
