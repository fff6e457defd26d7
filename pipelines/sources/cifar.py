"""CIFAR-10 and CIFAR-100 as published: the Python version, as an archive or extracted.

A unit is one batch file. The survey reads an archive to its last byte, so that its checksum covers
what is used; each unit reads it up to the end of its batch, whose checksum the survey took.
Pictures are encoded here, because no file holds them encoded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from msgspec.structs import asdict

from pipelines.sources.base import Extent, RawSample, Rejected, Spool, Survey, Unit, class_infos
from pipelines.sources.formats import safe_pickle
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.records import compact
from pipelines.sources.formats.safe_pickle import text_of
from pipelines.sources.formats.tar import read_members
from pipelines.sources.objects import first_names
from shardset.checksum import crc32c_of
from shardset.errors import SourceError
from shardset.format.images import stored_png
from shardset.storage.base import Stat, Storage, stat_or_none
from shardset.storage.checked import read_twice
from shardset.storage.open import open_file, open_storage

ImageFormat = Literal["png", "ppm"]

_NUM_VALUES = 3 * 32 * 32
_IMAGES_PER_ENCODE = 256


class _File(NamedTuple):
    """A file of the data set and the object that it is in; the content of a batch is b"" outside of
    an archive.
    """

    object: Stat
    content: bytes


@dataclass(frozen=True)
class _Cifar:
    input: Storage
    archive: str | None
    image_format: ImageFormat = "png"

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
            f"{url}: no {cls.name} here: found {first_names(storage)}; expected {archive}, the"
            " Python version, or the folder that it unpacks to"
        )

    def survey(self) -> Survey:
        """One unit for each batch file; raises SourceError if one is missing or the archive is
        damaged.
        """
        files = read_twice(self._files)
        if missing := [name for name in self._file_names() if name not in files]:
            raise SourceError(
                f"{self._where()}: found {', '.join(sorted(files)) or 'none'} of the files of"
                f" {self.name}, also expected {', '.join(missing)}; download"
                f" {self.published}.tar.gz again, or name the right --source"
            )
        where = self._where(self.names_file)
        fields = safe_pickle.loads(files[self.names_file].content, where)
        names = [
            list(map(text_of, _list_of(str | bytes, fields, field, where)))
            for field in self.columns.values()
        ]
        units: list[Unit] = [
            {
                "batch": batch,
                "prefix": prefix,
                "object": asdict(files[batch].object),
                "crc32c": crc32c_of(files[batch].content),
                "names": names,
            }
            for batch, prefix in self.batches.items()
        ]
        stats = [files[name].object for name in self._file_names()]
        return Survey(
            units=units,
            classes=class_infos(names[-1]),
            splits=("train", "test"),
            objects={stat.name: stat.num_bytes for stat in stats},
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The rows of one batch, in order, with their encoded pictures in the spool.

        A sample is named BATCH/FILENAME#ROW, because file names repeat. Its key is `train-1-00042`
        or `test-00042`.
        """
        batch, names = unit["batch"], unit["names"]
        where = self._where(batch)
        file = RangeFile(self.input, Stat(**unit["object"]))
        if self.archive:
            content = read_members(file, where, [batch], to_end=False).get(batch, b"")
            if crc32c_of(content) != unit["crc32c"]:
                raise SourceError(
                    f"{where}: its CRC32C changed since the survey; download it again"
                )
        else:
            content = file.read()
        fields = safe_pickle.loads(content, where)
        data = _pixels_in(fields, where)
        filenames = _list_of(str | bytes, fields, "filenames", where, len(data))
        labels = [_list_of(int, fields, field, where, len(data)) for field in self.columns]
        for of_column, classes in zip(labels, names, strict=True):
            _check_labels(of_column, len(classes), where)
        for row, picture in enumerate(_encoded(data, self.image_format)):
            contents: dict[str, Extent | bytes] = {self.image_format: spool.add(picture)}
            if len(names) > 1:
                coarse = labels[0][row]
                contents["json"] = compact(
                    {"coarse_label": coarse, "coarse_name": names[0][coarse]}
                ).encode()
            yield RawSample(
                name=f"{batch}/{text_of(filenames[row])}#{row}",
                key=f"{unit['prefix']}-{row:05d}",
                split=unit["prefix"].partition("-")[0],
                label=labels[-1][row],
                image=self.image_format,
                fields=contents,
            )

    def _file_names(self) -> list[str]:
        return [*self.batches, self.names_file]

    def _where(self, name: str = "") -> str:
        if self.archive:
            return f"{self.input.url}/{self.archive}" + (f": {name}" if name else "")
        return f"{self.input.url}/{name}" if name else self.input.url

    def _files(self) -> dict[str, _File]:
        """The files of the data set that are there, by base name, with the contents of those that
        name classes.
        """
        names = self._file_names()
        if self.archive:
            stat = stat_or_none(self.input, self.archive)
            if stat is None:
                raise SourceError(f"{self._where()}: not there; found {first_names(self.input)}")
            contents = read_members(RangeFile(self.input, stat), self._where(), names)
            return {name: _File(stat, content) for name, content in contents.items()}
        files = {}
        for name in names:
            if stat := stat_or_none(self.input, name):
                is_read = name == self.names_file
                files[name] = _File(stat, RangeFile(self.input, stat).read() if is_read else b"")
        return files


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


def _encoded(data: np.ndarray, image_format: ImageFormat) -> Iterator[bytes]:
    """Each picture, of uint8 [rows, 3072] in red, green, blue planes, as a PNG or a binary PPM (P6)
    file.
    """
    for start in range(0, len(data), _IMAGES_PER_ENCODE):
        planes_NCHW = data[start : start + _IMAGES_PER_ENCODE].reshape(-1, 3, 32, 32)
        images_NHWC = np.ascontiguousarray(planes_NCHW.transpose(0, 2, 3, 1))
        if image_format == "png":
            yield from stored_png.stored(images_NHWC)
        else:
            yield from (b"P6\n32 32\n255\n" + image.tobytes() for image in images_NHWC)


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


def _check_labels(labels: list[int], num_classes: int, where: str) -> None:
    for row, label in enumerate(labels):
        if not 0 <= label < num_classes:
            raise SourceError(
                f"{where}: row {row}: label {label}, expected 0 to {num_classes - 1}; the file is"
                " damaged, download it again"
            )
