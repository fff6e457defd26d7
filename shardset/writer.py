"""Writes a shard set from any loop, in one process and without Beam, with the tars, indexes and manifest of a build.

with shardset.Writer("shards", samples_per_shard=1000) as writer:
    for image, label in pairs:
        writer.write(image=image, label=label)
"""

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardset.arguments import require_int
from shardset.decode.image import decode
from shardset.errors import ConfigError, UndecodableImage
from shardset.format import manifest as manifests
from shardset.format import naming, stored_png
from shardset.format.images import format_of
from shardset.format.index import index_dtype
from shardset.format.manifest import ClassInfo, Manifest, Provenance, Quarantine, Split
from shardset.format.shards import pattern_of
from shardset.format.tar import StoredSample, TarBuilder
from shardset.format.write import class_counts, write_index, write_split
from shardset.storage.base import ABSENT, Storage
from shardset.storage.base import Writer as StorageWriter
from shardset.storage.open import open_storage
from shardset.version import __version__


class Writer:
    """Writes a new shard set into `output`, a folder or a `gs://` address; the manifest appears when the block ends.

    Shards hold `samples_per_shard` samples, the last one of a split may hold fewer. Samples are stored in the order in
    which they come: if classes come one after the other, shuffle them first, or let `python -m pipelines build --source
    webdataset` make a mixed set of the finished one. `classes` are the names of the labels 0, 1, ...; without them a
    label is its own name. An exception in the block removes everything that was written. Not for several threads.
    Memory: about 100 bytes a sample.

    Raises ConfigError if the folder already holds a set, or what a killed writer left.
    """

    def __init__(
        self, output: str | Path | Storage, *, samples_per_shard: int = 1000, classes: Sequence[str] | None = None
    ) -> None:
        self._samples_per_shard = require_int("samples_per_shard", samples_per_shard)
        if self._samples_per_shard < 1:
            raise ConfigError(f"samples_per_shard is {samples_per_shard}, expected at least 1")
        self._storage = open_storage(str(output)) if isinstance(output, str | Path) else output
        self._classes = None if classes is None else list(classes)
        self._splits: dict[str, _SplitWriter] = {}
        self._keys: set[str] = set()
        if next(self._storage.list(naming.MANIFEST), None) is not None:
            raise ConfigError(f"{self._storage.url}: there is a shard set already; choose another output")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._abort(error)
            return
        try:
            manifest = self._finish()
        except BaseException as failure:
            self._abort(failure)
            raise
        # Nothing is removed from here on: the manifest may be there even if its writer fails.
        _put(self._storage, naming.MANIFEST, manifests.to_json(manifest))

    def write(
        self,
        *,
        image: bytes | np.ndarray,
        label: int | None = None,
        key: str | None = None,
        json: Mapping[str, Any] | Sequence[Any] | bytes | None = None,
        split: str = "train",
    ) -> None:
        """Adds a sample to a split.

        `image` is an encoded image, stored byte for byte, or pixels, stored as PNG: uint8 [height, width] or [height,
        width, 3]. `label` is from 0, None if there is none. `key` names the sample in all splits; by default it is its
        number. `json` is stored beside the image. Raises ConfigError for arguments that can't be stored, and
        UndecodableImage for bytes that are no whole image of a supported format; the sample is left out then, and
        others may follow.
        """
        number = len(self._keys)
        key = f"{number:09d}" if key is None else key
        where = f"sample {number} ({key!r})"
        if not naming.is_split(split):
            raise ConfigError(f"{where}: {split!r} can't name a split; use letters, digits, - and _, but not plan")
        if not naming.is_key(key) or key in self._keys:
            why = "was used before" if key in self._keys else "is no key: use up to 72 ASCII letters, digits and _+=-/"
            raise ConfigError(f"{where}: the key {why}")
        fields = [_image_field(image, where)]
        if label is not None:
            label = self._checked_label(label, where)
            fields.append(("cls", str(label).encode()))
        if json is not None:
            fields.append(("json", json if isinstance(json, bytes) else msgspec.json.encode(json)))
        if split not in self._splits:
            self._splits[split] = _SplitWriter(self._storage, split, self._samples_per_shard)
        self._splits[split].add(key, fields, -1 if label is None else label)
        self._keys.add(key)

    def _checked_label(self, label: int, where: str) -> int:
        label = require_int("label", label)
        if label < 0 or (self._classes is not None and label >= len(self._classes)):
            most = "" if self._classes is None else f" to {len(self._classes) - 1}"
            raise ConfigError(f"{where}: label is {label}, expected 0{most}; use None for a sample without a label")
        return label

    def _finish(self) -> Manifest:
        """Writes everything but the manifest, which it returns."""
        if not self._splits:
            raise ConfigError(f"{self._storage.url}: no sample was written, and a shard set can't be empty")
        names = self._classes
        if names is None:
            names = [str(label) for label in range(1 + max(split.largest_label for split in self._splits.values()))]
        splits = {name: split.finish(len(names)) for name, split in sorted(self._splits.items())}
        quarantine = naming.quarantine_path()
        _put(self._storage, quarantine, b"")
        return manifests.seal(
            Manifest(
                kind=manifests.KIND,
                version=manifests.VERSION,
                digest="",
                classes=[ClassInfo(label=label, name=name) for label, name in enumerate(names)],
                splits=splits,
                quarantine=Quarantine(count=0, path=quarantine),
                fixes={},
                provenance=Provenance(
                    tool=f"shardset {__version__}",
                    source="writer",
                    source_digest=_digest(group.plan_digest for split in splits.values() for group in split.groups),
                    options={"samples_per_shard": self._samples_per_shard},
                    libraries={},
                    notes=[],
                ),
            )
        )

    def _abort(self, error: BaseException) -> None:
        for split in self._splits.values():
            split.abort(error)
        self._storage.delete(naming.quarantine_path())


class _SplitWriter:
    """Writes the shards of one split, one after the other; their indexes wait for the fields of the last sample."""

    def __init__(self, storage: Storage, name: str, samples_per_shard: int) -> None:
        if (found := next(storage.list(f"{name}/"), None)) is not None:
            raise ConfigError(
                f"{storage.url}/{found.name}: left by a writer or a build that was stopped; remove the folder "
                f"{name}/, or choose another output"
            )
        self.largest_label = -1
        self._storage, self._name, self._samples_per_shard = storage, name, samples_per_shard
        self._tars: list[tuple[TarBuilder, NDArray[Any]]] = []
        self._builder = TarBuilder(())
        self._num_samples = 0
        self._out: StorageWriter | None = None

    def add(self, key: str, fields: Sequence[tuple[str, bytes]], label: int) -> None:
        """Writes a sample, and the end of its tar if it is the last one in it."""
        if self._out is None:
            self._builder = TarBuilder(self._builder.fields)  # columns keep their places from shard to shard
            self._out = self._storage.writer(self._path(len(self._tars)), if_generation=ABSENT).__enter__()
        self._out.write(self._builder.add(StoredSample(key=key, fields=fields, label=label, source=self._num_samples)))
        self.largest_label = max(self.largest_label, label)
        self._num_samples += 1
        if self._num_samples % self._samples_per_shard == 0:
            self._end_tar()

    def finish(self, num_classes: int) -> Split:
        """Writes what is left: the end of the last tar, the indexes and the table."""
        self._end_tar()
        fields, totals, shards = self._builder.fields, np.zeros(num_classes, np.int64), []
        for number, (builder, rows) in enumerate(self._tars):
            full = np.zeros(len(rows), index_dtype(fields, rows.dtype["key"].itemsize))
            for column in rows.dtype.names or ():
                full[column] = rows[column]
            shards.append(write_index(self._path(number), builder, full, partial(_absent, self._storage)))
            totals += class_counts(rows["label"], num_classes)
        table = naming.table_path(self._name)
        with _absent(self._storage, table) as out:
            return write_split(
                out,
                shards,
                pattern=pattern_of(self._name, self._name, len(shards)),
                table_path=table,
                num_shards=len(shards),
                class_totals=totals.tolist(),
                seed=0,
                plan_digest=_digest(written.shard.sha256 for written in shards),
                promises=["reproducible"],
            )

    def abort(self, error: BaseException) -> None:
        """Removes everything that was written."""
        if self._out is not None:
            self._out.__exit__(type(error), error, error.__traceback__)
        for number in range(len(self._tars)):
            self._storage.delete(self._path(number))
            self._storage.delete(naming.index_path(self._path(number)))
        self._storage.delete(naming.table_path(self._name))

    def _path(self, number: int) -> str:
        return naming.shard_path(self._name, self._name, number)

    def _end_tar(self) -> None:
        if self._out is not None:
            out, self._out = self._out, None
            out.write(self._builder.finish())
            out.__exit__(None, None, None)
            self._tars.append((self._builder, self._builder.take_index()))


def _image_field(image: bytes | np.ndarray, where: str) -> tuple[str, bytes]:
    """The field and the content of an image; raises ConfigError or UndecodableImage."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)) or 0 in image.shape:
            raise ConfigError(
                f"{where}: pixels are {image.dtype} {list(image.shape)}, expected uint8 [height, width] or "
                "[height, width, 3]"
            )
        if image.ndim == 3 and stored_png.fits(*image.shape[:2]):
            return "png", stored_png.stored(image[None])[0]
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return "png", file.getvalue()
    try:
        decode(image)
        return format_of(image), image
    except UndecodableImage as error:
        raise UndecodableImage(error.reason, f"{where}: {error.detail}") from error


def _absent(storage: Storage, path: str) -> StorageWriter:
    """Writes a file that must not exist."""
    return storage.writer(path, if_generation=ABSENT)


def _put(storage: Storage, path: str, data: bytes) -> None:
    with _absent(storage, path) as out:
        out.write(data)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
