"""Writes a shard set from any loop, in one process, with the tars,
indexes and manifest of a build.
"""

import hashlib
import json as jsons
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, SupportsFloat

import msgspec
import numpy as np
import pyarrow as pa

from shardset.decode.image import decode, image_size
from shardset.errors import ConfigError, UndecodableImage, require_int
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.columns import npy
from shardset.format.images import format_of, masks, stored_png
from shardset.format.labels import MAX_LABEL, NO_LABEL, notes_on, plain_label, why_sparse
from shardset.format.manifest import ClassInfo, Manifest, Provenance, Quarantine, Split
from shardset.format.rows import numbers, with_fields
from shardset.format.shards import pattern_of
from shardset.format.tar import StoredSample, TarBuilder
from shardset.format.write import (
    OpenWriter,
    class_counts,
    open_tar,
    write_index,
    write_split,
)
from shardset.storage.base import ABSENT, ObjectWriter, Storage, try_to_delete
from shardset.storage.open import open_storage
from shardset.version import __version__


class Writer:
    """Writes a new shard set from your loop, in one process.

    Use it in a `with` block: the manifest appears when the block ends, and an exception in the
    block removes all that was written. Samples are stored in the order in which they come, so
    shuffle sorted classes first; the last shard of a split may be smaller. It needs about 100 bytes
    of memory per sample. Don't share it between threads.

    Args:
        output: A new folder: a local path, an address such as `gs://bucket/prefix`, or a Storage.
        samples_per_shard: Samples in a tar.
        classes: The names of the labels 0, 1, ... Without it a label is its own name, and may leave
            out at most 100,000 of the numbers below it that no sample had before.

    Raises:
        ConfigError: The folder holds a set, or files that a stopped writer left; or the block ends
            without a sample.
        StorageError: The storage refused or failed.

    Examples:
        >>> import numpy as np
        >>> import shardset
        >>> with shardset.Writer("new", classes=["dark", "light"]) as writer:
        ...     for label in (0, 1):
        ...         image = np.full((32, 32, 3), 255 * label, np.uint8)
        ...         writer.write(image=image, label=label)
        >>> shardset.open("new")[1].class_name
        'light'
    """

    def __init__(
        self,
        output: str | Path | Storage,
        *,
        samples_per_shard: int = 1000,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._storage = open_storage(str(output)) if isinstance(output, str | Path) else output
        self._size = require_int("samples_per_shard", samples_per_shard)
        if self._size < 1:
            raise ConfigError(f"samples_per_shard is {samples_per_shard}, expected at least 1")
        self._classes = None if classes is None else list(classes)
        self._splits: dict[str, _SplitWriter] = {}
        self._keys: set[str] = set()
        self._labels = Counter({NO_LABEL: 0})
        self._created: list[str] = []
        self._refuse(naming.MANIFEST, "there is a shard set already; choose another output")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._abort(error)
            return
        try:
            manifest = self._finish()
        except BaseException as failure:
            self._abort(failure)
            raise
        # Nothing is removed from here on: the manifest may be there even if its writer fails.
        self._put(naming.MANIFEST, manifests.to_json(manifest))

    def write(
        self,
        *,
        image: bytes | bytearray | memoryview | np.ndarray,
        label: SupportsFloat | str | None = None,
        key: str | None = None,
        json: Any = None,
        fields: Mapping[str, Any] | None = None,
        split: str = "train",
    ) -> None:
        """Adds a sample to a split.

        Args:
            image: An encoded image, stored byte for byte; or pixels, stored as PNG: uint8 [height,
                width] or [height, width, 3].
            label: A whole number from 0, also as text or float; None if there is none.
            key: The name of the sample, unique in all splits; by default its number.
            json: The field `json`; None for none.
            fields: What is stored next to the image, by name, such as {"txt": caption,
                "emb.npy": array, "mask.png": png}. The last extension decides, as in webdataset:
                arrays and numbers of NumPy as `npy`, text as `txt`, values as `json`, where text
                must be JSON and is stored as it is. Bytes are stored as they are.
            split: The name of the split.

        Raises:
            ConfigError: A value can't be stored.
            UndecodableImage: The bytes are no complete image of a supported format, or a field such
                as `mask.png` is no mask of it. The sample is left out, and others may follow.
        """
        key = f"{len(self._keys):09d}" if key is None else key
        where = f"sample {len(self._keys)} ({key!r})"
        if not naming.is_split(split):
            raise ConfigError(f"{where}: {split!r} can't name a split; use {naming.SPLIT_NAMES}")
        if not naming.is_key(key):
            raise ConfigError(f"{where}: not a key; use up to 72 ASCII letters, digits and _+=-/")
        if key in self._keys:
            raise ConfigError(f"{where}: the key was used before")
        stored = [_image_field(image, where)]
        number = NO_LABEL if label is None else self._number(label, where)
        if number != NO_LABEL:
            stored.append(("cls", str(number).encode()))
        given = {} if json is None else {"json": json}
        for name, value in [*given.items(), *(fields or {}).items()]:
            if not naming.is_field(name) or name == "cls" or name in dict(stored):
                raise ConfigError(f"{where}: {name!r} can't name a field here")
            content = _content(name.rpartition(".")[2], value, f"{where}: {name}")
            if masks.is_mask_field(name):
                with _located(f"{where} {name}"):
                    masks.read(content, image_size(stored[0][1])[::-1])
            stored.append((name, content))
        if split not in self._splits:
            self._refuse(
                f"{split}/",
                f"left by a writer or a build that was stopped; remove the folder {split}/",
            )
            self._splits[split] = _SplitWriter(self._create, split, self._size)
        self._splits[split].add(key, stored, number)
        self._keys.add(key)
        self._labels[number] += 1

    def _number(self, label: Any, where: str) -> int:
        """The label as a number; raises ConfigError if it can't be one, or would leave too many
        numbers unused.
        """
        number = plain_label(label)
        if number is None:  # perhaps an integer of NumPy
            number = require_int("label", label)
        most = MAX_LABEL if self._classes is None else len(self._classes) - 1
        if not 0 <= number <= most:
            raise ConfigError(
                f"{where}: label is {number}, expected 0 to {most}; use None for a sample without a"
                " label"
            )
        why = why_sparse(number, len(self._labels))  # with NO_LABEL, which stands for this one
        if why and self._classes is None:
            raise ConfigError(f"{where}: label {number}: {why} by `classes`")
        return number

    def _finish(self) -> Manifest:
        """Writes everything but the manifest, which it returns."""
        if not self._splits:
            raise ConfigError(
                f"{self._storage.url}: no sample was written, and a shard set can't be empty"
            )
        largest = max(self._labels) if self._classes is None else NO_LABEL
        names = self._classes or [str(label) for label in range(largest + 1)]
        splits = {name: split.finish(len(names)) for name, split in sorted(self._splits.items())}
        self._put(naming.quarantine_path(), b"")
        manifest = Manifest(
            kind=manifests.KIND,
            version=manifests.VERSION,
            digest="",
            classes=[ClassInfo(label=label, name=name) for label, name in enumerate(names)],
            splits=splits,
            quarantine=Quarantine(count=0, path=naming.quarantine_path()),
            fixes={},
            provenance=Provenance(
                tool=f"shardset {__version__}",
                source="writer",
                source_digest=_digest(
                    group.plan_digest for split in splits.values() for group in split.groups
                ),
                options={"samples_per_shard": self._size},
                libraries={},
                notes=notes_on(self._storage.url, self._labels, largest),
            ),
        )
        return manifests.seal(manifest)

    def _abort(self, error: BaseException) -> None:
        for split in self._splits.values():
            split.tar.__exit__(type(error), error, error.__traceback__)
        for path in self._created:
            if failure := try_to_delete(self._storage, path):
                error.add_note(f"{path} stays: {failure}")

    def _refuse(self, prefix: str, why: str) -> None:
        if (stat := next(self._storage.list(prefix), None)) is not None:
            raise ConfigError(f"{self._storage.url}/{stat.name}: {why}")

    @contextmanager
    def _create(self, path: str) -> Iterator[ObjectWriter]:
        with self._storage.writer(path, if_generation=ABSENT) as out:
            yield out
        self._created.append(path)

    def _put(self, path: str, data: bytes) -> None:
        with self._create(path) as out:
            out.write(data)


class _SplitWriter:
    """Writes the shards of a split one after the other; their indexes wait for the fields of the
    last sample.
    """

    def __init__(self, create: OpenWriter, name: str, size: int) -> None:
        self._create, self._name, self._size = create, name, size
        self.tar = ExitStack()
        self._num_samples = 0
        self._builder = TarBuilder(())
        self._tars: list[tuple[TarBuilder, pa.Table]] = []

    def add(self, key: str, fields: Sequence[tuple[str, bytes]], label: int) -> None:
        """Writes a sample, and the end of its tar if that is full."""
        if self._num_samples % self._size == 0:
            # columns keep their places from shard to shard
            opened = open_tar(self._path(len(self._tars)), self._builder.fields, self._create)
            self._builder, self._add = self.tar.enter_context(opened)
        self._add(StoredSample(key=key, fields=fields, label=label, serial=self._num_samples))
        self._num_samples += 1
        if self._num_samples % self._size == 0:
            self._end_tar()

    def finish(self, num_classes: int) -> Split:
        """Writes the end of the last tar, the indexes and the table."""
        if self._num_samples % self._size:
            self._end_tar()
        shards = [
            write_index(
                self._path(number), builder, with_fields(rows, self._builder.fields), self._create
            )
            for number, (builder, rows) in enumerate(self._tars)
        ]
        labels = np.concatenate([numbers(rows, "label") for _, rows in self._tars])
        return write_split(
            self._create,
            shards,
            pattern=pattern_of(self._name, self._name, len(shards)),
            table_path=naming.table_path(self._name),
            class_totals=class_counts(labels, num_classes).tolist(),
            plan_digest=_digest(written.shard.sha256 for written in shards),
            promises=["reproducible"],
        )

    def _path(self, number: int) -> str:
        return naming.shard_path(self._name, self._name, number)

    def _end_tar(self) -> None:
        self.tar.close()
        self._tars.append((self._builder, self._builder.take_index()))


def _content(extension: str, value: Any, where: str) -> bytes:
    """The bytes of a field; raises ConfigError for a value that its extension doesn't store."""
    data = _bytes_of(value)
    try:
        match extension:
            case "json" | "jsn":
                return _json(value if data is None else data)
            # Types of other libraries, such as bfloat16, come back as bytes without a type.
            case "npy" if isinstance(value, np.ndarray | np.generic) and value.dtype.isbuiltin < 2:
                return npy(np.asarray(value))
            case "txt" | "text" | "transcript" if isinstance(value, str):
                return value.encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{where} is {_kind_of(value)}, and {extension} can't store it ({error}); json stores"
            " dicts and lists, and text that is JSON already; a caption is txt"
        ) from error
    if data is None:
        raise ConfigError(
            f"{where} is {_kind_of(value)}, expected bytes; or use an extension that stores it: npy"
            " for arrays of NumPy, txt for text, json for other values"
        )
    return data


def _json(value: Any) -> bytes:
    """A value as JSON; bytes and text that are JSON as they are."""
    if not isinstance(value, bytes | str):
        return msgspec.json.encode(value, enc_hook=_plain)
    jsons.loads(value)
    return value if isinstance(value, bytes) else value.encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(_kind_of(value))


def _bytes_of(value: object) -> bytes | None:
    """Bytes from anything that holds bytes; None for all else, such as a view of other numbers."""
    if isinstance(value, memoryview) and (value.format, value.ndim) == ("B", 1):
        value = bytearray(value)
    return bytes(value) if isinstance(value, bytes | bytearray) else None


def _kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return "None" if value is None else f"of type {type(value).__name__}"


def _image_field(image: Any, where: str) -> tuple[str, bytes]:
    """The field and the content of an image; raises ConfigError or UndecodableImage."""
    if isinstance(image, np.ndarray):
        if (
            image.dtype != np.uint8
            or image.ndim not in (2, 3)
            or image.shape[2:] not in ((), (3,))
            or 0 in image.shape
        ):
            raise ConfigError(
                f"{where}: pixels are {_kind_of(image)}, expected uint8 [height, width] or [height,"
                " width, 3]"
            )
        return "png", stored_png.encoded(image)
    data = _bytes_of(image)
    if data is None:
        raise ConfigError(
            f"{where}: image is {_kind_of(image)}, expected bytes, or an array of its pixels:"
            ' np.asarray(image.convert("RGB"))'
        )
    with _located(where):
        decode(data)
        return format_of(data), data


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Adds to an UndecodableImage where it was raised."""
    try:
        yield
    except UndecodableImage as error:
        raise UndecodableImage(error.reason, f"{where} {error.detail}".rstrip()) from error


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
