"""CIFAR-10 and CIFAR-100 as published: the Python version, as an archive or extracted.

A unit is one batch file. The survey and each unit read an archive to its last byte, so that its
checksum covers what is used. Pictures are encoded here, because no file holds them encoded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar

import numpy as np
from msgspec.structs import asdict

from pipelines.sources import objects
from pipelines.sources.base import Extent, RawSample, Spool, Survey, Unit, class_infos
from pipelines.sources.formats import safe_pickle
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.record_table import compact
from pipelines.sources.formats.safe_pickle import text_of
from pipelines.sources.formats.tar import read_members
from shardset.errors import SourceError
from shardset.format.images import stored_png
from shardset.storage.base import Stat, Storage, stat_or_none
from shardset.storage.checked import read_twice
from shardset.storage.open import open_file, open_storage

_NUM_VALUES = 3 * 32 * 32
_IMAGES_PER_ENCODE = 256


@dataclass(frozen=True)
class _Cifar:
    input: Storage
    archive: str | None

    name: ClassVar[str]
    published: ClassVar[str]
    folder: ClassVar[str]
    batches: ClassVar[dict[str, str]]
    """The prefix of the keys of each file."""
    names_file: ClassVar[str]
    columns: ClassVar[dict[str, str]]
    """The field with the names of the classes, by that with their labels; the last is the label."""

    @classmethod
    def find(cls, url: str) -> tuple[Storage, str | None]:
        """The folder that `url` means, and the archive in it or None; raises SourceError if there
        is neither.

        `url` is a .tar.gz or .tgz file, a folder with the published archive, which is preferred,
        the extracted folder, or its parent.
        """
        if url.endswith((".tar.gz", ".tgz")):
            return open_file(url)
        storage, archive = open_storage(url), f"{cls.published}.tar.gz"
        if stat_or_none(storage, archive):
            return storage, archive
        for folder in (storage, open_storage(f"{url.rstrip('/')}/{cls.folder}")):
            if any(stat_or_none(folder, batch) for batch in cls.batches):
                return folder, None
        raise SourceError(
            f"{url}: no {cls.name} here: found {objects.first_names(storage)}; expected {archive},"
            " the Python version, or the folder that it unpacks to"
        )

    def survey(self) -> Survey:
        """One unit for each batch file, or for all of an archive, which is read from its start;
        raises SourceError if one is missing or the archive is damaged.
        """
        wanted, where = [*self.batches, self.names_file], self._where(self.names_file)
        if self.archive:
            stat = objects.stat_of(self.input, self.archive, "the Python version")
            contents = read_twice(lambda: self._read(stat, wanted))
            stats = dict.fromkeys(contents, stat)
        else:
            listed = {name: stat_or_none(self.input, name) for name in wanted}
            stats = {name: stat for name, stat in listed.items() if stat}
            contents = {}
        if missing := [name for name in wanted if name not in stats]:
            raise SourceError(
                f"{self._where()}: found {', '.join(sorted(stats)) or 'none'} of the files of"
                f" {self.name}, also expected {', '.join(missing)}; download"
                f" {self.published}.tar.gz again, or name the right --source"
            )
        contents = contents or read_twice(
            lambda: self._read(stats[self.names_file], [self.names_file])
        )
        fields = safe_pickle.loads(contents[self.names_file], where)
        names = [
            list(map(text_of, _list_of(str | bytes, fields, field, where)))
            for field in self.columns.values()
        ]
        each = [{batch: prefix} for batch, prefix in self.batches.items()]
        units = [self.batches] if self.archive else each
        return Survey(
            units=[
                {"batches": batches, "object": asdict(stats[next(iter(batches))]), "names": names}
                for batches in units
            ],
            classes=class_infos(names[-1]),
            splits=("train", "test"),
            objects={stat.name: stat.num_bytes for stat in stats.values()},
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample]:
        """The rows of the batches, in order, with their encoded pictures in the spool.

        A sample is named BATCH/FILENAME#ROW, because file names repeat. Its key is `train-1-00042`
        or `test-00042`.
        """
        contents = self._read(Stat(**unit["object"]), [*unit["batches"]])
        for batch, prefix in unit["batches"].items():
            yield from self._rows(batch, prefix, contents.pop(batch), unit["names"], spool)

    def _rows(
        self, batch: str, prefix: str, content: bytes, names: list[list[str]], spool: Spool
    ) -> Iterator[RawSample]:
        where = self._where(batch)
        fields = safe_pickle.loads(content, where)
        data = _pixels_in(fields, where)
        filenames = _list_of(str | bytes, fields, "filenames", where, len(data))
        labels = [_list_of(int, fields, field, where, len(data)) for field in self.columns]
        for column, classes in zip(labels, names, strict=True):
            if odd := {*column} - {*range(len(classes))}:
                raise SourceError(
                    f"{where}: row {column.index(min(odd))}: label {min(odd)}, expected 0 to"
                    f" {len(classes) - 1}; the file is damaged, download it again"
                )
        for row, picture in enumerate(_encoded(data)):
            stored: dict[str, Extent | bytes] = {"png": spool.add(picture)}
            if len(names) > 1:
                coarse = labels[0][row]
                stored["json"] = compact(
                    {"coarse_label": coarse, "coarse_name": names[0][coarse]}
                ).encode()
            yield RawSample(
                name=f"{batch}/{text_of(filenames[row])}#{row}",
                key=f"{prefix}-{row:05d}",
                split=prefix.partition("-")[0],
                label=labels[-1][row],
                image="png",
                fields=stored,
            )

    def _read(self, stat: Stat, names: list[str]) -> dict[str, bytes]:
        """The contents of files of the dataset, all of them in this object."""
        file = RangeFile(self.input, stat)
        if self.archive:
            return read_members(file, self._where(), names)
        return {stat.name: file.read()}

    def _where(self, name: str = "") -> str:
        separator = ": " if self.archive and name else "/"
        return f"{self.input.url}/{self.archive or ''}{separator}{name}".rstrip("/")


class Cifar10(_Cifar):
    """60,000 pictures of 10 classes; `archive` is its name in `input`, or None if `input` is the
    extracted folder.
    """

    name = "cifar10"
    published = "cifar-10-python"
    folder = "cifar-10-batches-py"
    batches: ClassVar = {
        **{f"data_batch_{number}": f"train-{number}" for number in range(1, 6)},
        "test_batch": "test",
    }
    names_file = "batches.meta"
    columns: ClassVar = {"labels": "label_names"}


class Cifar100(_Cifar):
    """60,000 pictures of 100 fine classes, which are the labels; the 20 coarse ones go into a
    `json` field.
    """

    name = "cifar100"
    published = folder = "cifar-100-python"
    batches: ClassVar = {"train": "train", "test": "test"}
    names_file = "meta"
    columns: ClassVar = {"coarse_labels": "coarse_label_names", "fine_labels": "fine_label_names"}


def _encoded(data: np.ndarray) -> Iterator[bytes]:
    """Each picture, of uint8 [rows, 3072] in red, green, blue planes, as a PNG."""
    for start in range(0, len(data), _IMAGES_PER_ENCODE):
        planes_NCHW = data[start : start + _IMAGES_PER_ENCODE].reshape(-1, 3, 32, 32)
        yield from stored_png.stored(np.ascontiguousarray(planes_NCHW.transpose(0, 2, 3, 1)))


def _pixels_in(fields: dict[str, Any], where: str) -> np.ndarray:
    data = fields.get("data")
    if not isinstance(data, np.ndarray) or data.shape[1] != _NUM_VALUES:
        shape = getattr(data, "shape", None)
        raise SourceError(
            f"{where}: array 'data': shape {shape}, expected [rows, {_NUM_VALUES}]; download it"
            " again"
        )
    return data


def _list_of(
    kind: type | UnionType, fields: dict[str, Any], field: str, where: str, size: int | None = None
) -> list[Any]:
    value = fields.get(field)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise SourceError(
            f"{where}: no list {field!r} of the right type in the pickle; found"
            f" {', '.join(sorted(fields))[:200] or 'nothing'}; download it again, or name the right"
            " --source"
        )
    if len(value) != (size or len(value)):
        raise SourceError(f"{where}: {len(value)} {field} for {size} pictures; download it again")
    return value
