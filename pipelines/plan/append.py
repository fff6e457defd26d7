"""The part of a set that an appending build needs: the labels of its classes, and what it knows of
its samples.

The name of a sample in its source is its identity, whatever its split.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.config import Known
from pipelines.plan import paths, tables
from pipelines.plan.files import PlanFiles
from pipelines.plan.tables import SampleRow
from pipelines.sources.base import (
    SPOOL,
    UNREAD,
    Extent,
    RawSample,
    Rejected,
    joined_classes,
)
from shardset.errors import SourceError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.labels import NO_LABEL
from shardset.format.manifest import ClassInfo, Manifest, Shard
from shardset.format.rows import first_images, numbers
from shardset.order.permutation import hash_text
from shardset.per_process import PerProcess
from shardset.read.indexes import read_index
from shardset.storage.base import Storage
from shardset.storage.many import in_order

Hashes = NDArray[np.uint64]

_KNOWN = pa.schema(
    [
        ("name", pa.uint64()),
        ("version", pa.uint64()),
        ("split", pa.uint16()),
        ("key", pa.uint64()),
        ("image", pa.uint64()),
    ]
)
"""A sample of the set: hashes of its name, or of its key if it has none, and of the generation and
size of its raw image; the number of its split; a hash of its key, and the number of its image.
"""

_UNKNOWN = 0
"""The version of a sample of which no build has noted it."""


class KnownSample(NamedTuple):
    """A sample of the set: the number of its split, and whether its raw image is the same, as far
    as generation and size tell.
    """

    split: int
    is_same: bool


class _Facts(NamedTuple):
    """The columns of the known samples, by name; `keys` and `images` are sorted for themselves."""

    names: Hashes
    versions: Hashes
    splits: NDArray[np.uint16]
    keys: Hashes
    images: Hashes


class Addition(msgspec.Struct, frozen=True, kw_only=True):
    """How a build appends to the version of a set that has the digest `base`.

    `labels` has the label in the set of each class of the input, and is empty where all stay the
    same. `categories` has the ids in the set of categories that the input numbers otherwise. The
    version has `num_classes`. `num_source_samples` are the version's, by split.
    `known` says what to do with samples of the input whose names the set has. It takes samples of
    sets that no build made by their keys.
    """

    base: str
    labels: list[int]
    categories: dict[int, int]
    num_classes: int
    num_source_samples: dict[str, int]
    known: Known
    by_name: bool


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
    return classes, [] if same else labels, {old: new for old, new in ids.items() if old != new}


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


def write_known(files: PlanFiles, base: Manifest, stored: Storage) -> None:
    """Writes what is known of the samples of a version, from its indexes in `stored`."""
    opened = manifests.opened(stored, base)
    tasks = [
        (number, shard)
        for number, split in enumerate(opened.splits.values())
        for shard in split.shards
    ]
    known_rows = in_order(stored.reads_at_once, tasks, lambda task: _known_of(stored, *task))
    [batch] = pa.concat_tables(known_rows).sort_by("name").combine_chunks().to_batches()
    files.write(paths.KNOWN, tables.to_bytes(batch))


def _known_of(storage: Storage, split: int, shard: Shard) -> pa.Table:
    """What is known of the samples of a shard."""
    index = read_index(storage, shard)
    columns = (index[name].to_pylist() for name in ("key", "name", "generation", "object_bytes"))
    keys, names, generations, sizes = columns
    versions = [
        _UNKNOWN if size is None else _version(generation or "", size)
        for generation, size in zip(generations, sizes, strict=True)
    ]
    images = image_number(numbers(index, "image_crc32c"), first_images(index)[1])
    hashes = tables.hash_keys([name or key for name, key in zip(names, keys, strict=True)])
    splits = np.full(len(index), split, np.uint16)
    return pa.table([hashes, versions, splits, tables.hash_keys(keys), images], _KNOWN)


def image_number(crc32c: Any, num_bytes: Any) -> Any:
    """A number that images of the same bytes share, from their CRC32C and size; of arrays too."""
    return (np.uint64(crc32c) << np.uint64(32)) | np.uint64(num_bytes)


def known_samples(
    files: PlanFiles, addition: Addition, samples: Sequence[RawSample | Rejected]
) -> Iterator[KnownSample | None]:
    """What the set has under the name of each sample; None for a new one."""
    facts = _known(files)
    names = tables.hash_keys(
        [
            sample.name if addition.by_name or isinstance(sample, Rejected) else sample.key
            for sample in samples
        ]
    )
    for row, sample in zip(_find(facts.names, names), samples, strict=True):
        if row < 0 or isinstance(sample, Rejected):
            yield None
        else:
            is_same = facts.versions[row] in (_UNKNOWN, _version_of(sample))
            yield KnownSample(facts.splits.item(row), is_same)


def renamed(files: PlanFiles, addition: Addition, rows: Sequence[SampleRow]) -> list[SampleRow]:
    """The rows of a unit; one whose key the set has gets a new one, as a duplicate key does."""
    is_taken = zip(rows, _taken(files, [row.stored_key(0) for row in rows]), strict=True)
    return [_renamed(row, addition.base) if taken else row for row, taken in is_taken]


def count_known_images(files: PlanFiles, rows: Iterable[SampleRow]) -> int:
    """How many rows have an image that the set has, as far as the build has read it."""
    images = (row.raw_image for row in rows)
    numbers = [
        image_number(image.crc32c, image.num_bytes)
        for image in images
        if isinstance(image, Extent) and image.crc32c != UNREAD
    ]
    return int((_find(_known(files).images, np.array(numbers, np.uint64)) >= 0).sum())


def refuse_known_key(files: PlanFiles, row: SampleRow, key: str) -> None:
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


def _renamed(row: SampleRow, base: str) -> SampleRow:
    return msgspec.structs.replace(row, key=naming.short_key(f"{base}/{row.name}\0{row.key}"))


def _version_of(sample: RawSample) -> int:
    image = sample.fields.get(sample.image, b"")
    if isinstance(image, bytes):
        return _version("", len(image))
    return _version("" if image.object == SPOOL else image.generation, image.num_bytes)


def _version(generation: str, num_bytes: int) -> int:
    return hash_text(f"{generation}/{num_bytes}", key=0)


@PerProcess
def _known(files: PlanFiles) -> _Facts:
    """What `plan/known.arrow` says, read once."""
    table = tables.from_bytes(files.read(paths.KNOWN), _KNOWN)
    names, versions, splits, keys, images = (column.to_numpy() for column in table.columns)
    return _Facts(names, versions, splits, np.sort(keys), np.unique(images))


def _taken(files: PlanFiles, keys: Sequence[str]) -> NDArray[np.bool_]:
    """Whether the set has each of these keys."""
    return _find(_known(files).keys, tables.hash_keys(keys)) >= 0


def _find(numbers: Hashes, wanted: Hashes) -> NDArray[np.int64]:
    """The places of some numbers among sorted ones; -1 for those that are not there."""
    places = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return np.where(numbers[places] == wanted, places, -1)
