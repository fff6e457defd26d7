"""What a build that appends takes from the set: the labels of its classes, its keys, and the images
that it holds.
"""

import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.config import Known
from pipelines.plan import paths, tables
from pipelines.plan.files import PlanFiles, in_order
from pipelines.plan.tables import UnitRow
from pipelines.sources.base import Extent, RawSample, Rejected
from shardset.checksum import crc32c_of
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.images import is_image_field
from shardset.format.index import first_images
from shardset.format.manifest import ClassInfo, Manifest, Shard
from shardset.format.originals import stored_key
from shardset.read.indexes import read_index

Hashes = NDArray[np.uint64]

_WORD = 2**32
_reading = threading.Lock()
_read: dict[tuple[str, str], Hashes] = {}
"""What this process has read, by build and file: a runner may have a dozen threads."""


class Addition(msgspec.Struct, frozen=True, kw_only=True):
    """How a build appends to the version of a set that has the digest `base`.

    `labels` has the label in the set of each class of the input, and is empty where all stay the
    same. The version has `num_classes`. `num_source_samples` are those of the version, by split.
    `known` says which samples of the input to skip.
    """

    base: str
    labels: list[int]
    num_classes: int
    num_source_samples: dict[str, int]
    known: Known


def extended_classes(
    old: Sequence[ClassInfo], new: Sequence[ClassInfo] | None
) -> tuple[Sequence[ClassInfo] | None, list[int]]:
    """The classes of a set with those of an input, and the labels that these get, as in `Addition`.

    Classes are the same if their wnids are, or their names where one has no wnid; further ones
    follow. Without names of the input its labels mean the classes of the set, and may go beyond
    them if those have no names either.
    """
    if new is None and are_numbers(old):
        return None, []
    if new is None or (are_numbers(new) and not are_numbers(old)):
        return old, []
    classes, labels = [*old], []
    by_wnid = {info.wnid: info.label for info in old if info.wnid}
    by_name: dict[str, list[ClassInfo]] = {}
    for info in old:
        by_name.setdefault(info.name, []).append(info)
    for info in new:
        same = [each.label for each in by_name.get(info.name, []) if not (each.wnid and info.wnid)]
        if info.wnid in by_wnid:
            same = [by_wnid[info.wnid]]
        if len(same) > 1:
            raise ConfigError(
                f"classes {same} of the set are all called {info.name!r}; give the input their"
                " wnids"
            )
        if not same:
            classes.append(msgspec.structs.replace(info, label=len(classes)))
        labels.append(same[0] if same else classes[-1].label)
    return classes, [] if labels == [*range(len(labels))] else labels


def relabelled(sample: RawSample | Rejected, labels: Sequence[int]) -> RawSample | Rejected:
    """A sample of the input with its label in the set."""
    if isinstance(sample, Rejected) or not 0 <= sample.label < len(labels):
        return sample
    label = labels[sample.label]
    fields = sample.fields | ({"cls": b"%d" % label} if "cls" in sample.fields else {})
    return msgspec.structs.replace(sample, label=label, fields=fields)


def write_known(files: PlanFiles, base: Manifest, known: Known) -> None:
    """Writes the hashes of all keys of a version, from its indexes; also of its images if these are
    to be skipped.
    """
    output, opened = files.output, manifests.opened(files.output, base)

    names = (paths.KNOWN_KEYS, paths.KNOWN_IMAGES) if known == "content" else (paths.KNOWN_KEYS,)

    def hashes(shard: Shard) -> list[Hashes]:
        index = read_index(output, shard)
        images = images_of(index)
        return [_keys_of(index), images[images > 0]][: len(names)]

    found_in = zip(*in_order(output, opened.shards, hashes), strict=True)
    for name, found in zip(names, found_in, strict=True):
        files.write(name, np.unique(np.concatenate(found)).tobytes())


def admitted(files: PlanFiles, addition: Addition, rows: Sequence[UnitRow]) -> list[UnitRow]:
    """The rows of a unit without those to skip; a row whose key the set has gets a new one, as a
    duplicate key does.
    """
    if addition.known == "content":
        images = np.array([_image_of(row) for row in rows], np.uint64)
        rows = [
            row
            for row, known in zip(rows, _among(files, paths.KNOWN_IMAGES, images), strict=True)
            if not known
        ]
    taken = _among(files, paths.KNOWN_KEYS, _hash_keys([stored_key(row, 0, 0) for row in rows]))
    if addition.known == "name":
        return [row for row, known in zip(rows, taken, strict=True) if not known]
    return [
        _renamed(row, addition.base) if known else row
        for row, known in zip(rows, taken, strict=True)
    ]


def refuse_known_key(files: PlanFiles, row: UnitRow, key: str) -> None:
    """Raises SourceError if the set has the key that a sample got because another one of the input
    has its own.
    """
    if _among(files, paths.KNOWN_KEYS, _hash_keys([key])).any():
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


def _hash_keys(keys: Sequence[str]) -> Hashes:
    return tables.hash_keys(pa.array(keys, pa.string()))


def _keys_of(index: NDArray[np.void]) -> Hashes:
    return _hash_keys(index["key"].astype(str).tolist())


def _image_of(row: UnitRow) -> int:
    """The CRC32C and the size of the first image of a row as one number; 0 if it has none."""
    for field, content in row.content.fields:
        if is_image_field(field):
            if isinstance(content, Extent):
                return content.crc32c * _WORD + content.num_bytes % _WORD
            return crc32c_of(content) * _WORD + len(content) % _WORD
    return 0


def images_of(index: NDArray[np.void]) -> Hashes:
    """The same number of each sample of an index: equal images have equal ones,
    0 stands for none.
    """
    sizes = first_images(index)[1].astype(np.uint64)
    numbers: Hashes = index["image_crc32c"].astype(np.uint64) * _WORD + sizes % _WORD
    numbers[sizes == 0] = 0
    return numbers


def _among(files: PlanFiles, name: str, numbers: Hashes) -> NDArray[np.bool_]:
    with _reading:
        if (files.build, name) not in _read:
            _read[files.build, name] = np.frombuffer(files.read(name), np.uint64)
    known = _read[files.build, name]
    places = np.minimum(np.searchsorted(known, numbers), max(0, len(known) - 1))
    return np.equal(known[places], numbers) if len(known) else np.zeros(len(numbers), bool)
