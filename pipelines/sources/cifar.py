"""CIFAR-10 and CIFAR-100 as published: the python and the binary version, as an archive or
extracted.

A unit is one batch file. The survey reads an archive to its last byte, so that its checksum covers
what is used; each unit reads it up to the end of its batch, whose checksum the survey took.
Pictures are encoded here, because no file holds them encoded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from msgspec.structs import asdict

from pipelines.sources.base import Extent, RawSample, Rejected, Spool, Survey, Unit, class_infos
from pipelines.sources.formats import safe_pickle
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.records import compact
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


class Column(NamedTuple):
    """One label of a row: the file with its class names and, in python versions, the fields of
    names and labels.
    """

    names_file: str
    names_field: str = ""
    labels_field: str = ""


class Form(NamedTuple):
    """One published form: `batches` maps a file to the prefix of its keys; the last of `columns` is
    the label.
    """

    name: str
    folder: str
    batches: dict[str, str]
    columns: tuple[Column, ...]

    @property
    def files(self) -> list[str]:
        """The base names of all files that are needed."""
        return [*self.batches, *dict.fromkeys(column.names_file for column in self.columns)]


class CifarBatch(NamedTuple):
    """The rows of one file: `data` is uint8 [rows, 3072] (red, green, blue planes), `labels` a list
    per column.
    """

    data: np.ndarray
    labels: list[list[int]]
    filenames: list[str] | None


_KEYS_10 = {
    **{f"data_batch_{number}": f"train-{number}" for number in range(1, 6)},
    "test_batch": "test",
}
_KEYS_100 = {"train": "train", "test": "test"}
_BINARY_10, _BINARY_100 = (
    {f"{name}.bin": key for name, key in keys.items()} for keys in (_KEYS_10, _KEYS_100)
)
_COARSE = Column("meta", "coarse_label_names", "coarse_labels")
_FINE = Column("meta", "fine_label_names", "fine_labels")


CIFAR10_FORMS = (
    Form(
        "cifar-10-python",
        "cifar-10-batches-py",
        _KEYS_10,
        (Column("batches.meta", "label_names", "labels"),),
    ),
    Form("cifar-10-binary", "cifar-10-batches-bin", _BINARY_10, (Column("batches.meta.txt"),)),
)
CIFAR100_FORMS = (
    Form("cifar-100-python", "cifar-100-python", _KEYS_100, (_COARSE, _FINE)),
    Form(
        "cifar-100-binary",
        "cifar-100-binary",
        _BINARY_100,
        (Column("coarse_label_names.txt"), Column("fine_label_names.txt")),
    ),
)


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
    forms: ClassVar[tuple[Form, ...]]

    @classmethod
    def find(cls, url: str) -> tuple[Storage, str | None]:
        """The folder that `url` means, and the archive in it or None; raises SourceError if there
        is neither.

        `url` is a .tar.gz or .tgz file, a folder with a published archive, the extracted folder, or
        its parent. An archive is preferred to extracted files, and a python version to a binary
        one, which has no file names.
        """
        if url.endswith((".tar.gz", ".tgz")):
            return open_file(url)
        storage = open_storage(url)
        for form in cls.forms:
            if stat_or_none(storage, archive := f"{form.name}.tar.gz"):
                return storage, archive
        for folder in (
            storage,
            *(open_storage(f"{url.rstrip('/')}/{form.folder}") for form in cls.forms),
        ):
            if any(stat_or_none(folder, batch) for form in cls.forms for batch in form.batches):
                return folder, None
        raise SourceError(
            f"{url}: no {cls.name} here: found {first_names(storage)}; expected"
            f" {', '.join(f'{form.name}.tar.gz' for form in cls.forms)}, or the folder that one of"
            " them unpacks to"
        )

    def survey(self) -> Survey:
        """One unit for each batch file; raises SourceError if one is missing or the archive is
        damaged.
        """
        files = read_twice(self._files)
        form = max(self.forms, key=lambda form: sum(name in files for name in form.batches))
        if missing := [name for name in form.files if name not in files]:
            raise SourceError(
                f"{self._where()}: found {', '.join(sorted(files)) or 'none'} of the files of"
                f" {self.name}, also expected {', '.join(missing)}; download {form.name}.tar.gz"
                " again, or name the right --source"
            )
        names = [
            _class_names(column, files[column.names_file].content, self._where(column.names_file))
            for column in form.columns
        ]
        units: list[Unit] = [
            {
                "batch": batch,
                "prefix": prefix,
                "form": form.name,
                "object": asdict(files[batch].object),
                "crc32c": crc32c_of(files[batch].content),
                "names": names,
            }
            for batch, prefix in form.batches.items()
        ]
        return Survey(
            units=units,
            classes=class_infos(names[-1]),
            objects={
                stat.name: stat.num_bytes for stat in (files[name].object for name in form.files)
            },
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The rows of one batch, in order, with their encoded pictures in the spool.

        A sample of a python version is named BATCH/FILENAME#ROW, because file names repeat. A
        binary version has no file names; its samples are named by their keys. Keys are the same in
        all forms: `train-1-00042`, `test-00042`.
        """
        form = next(form for form in self.forms if form.name == unit["form"])
        where, names = self._where(unit["batch"]), unit["names"]
        file = RangeFile(self.input, Stat(**unit["object"]))
        if self.archive:
            content = read_members(file, where, [unit["batch"]], to_end=False).get(
                unit["batch"], b""
            )
            if crc32c_of(content) != unit["crc32c"]:
                raise SourceError(
                    f"{where}: its CRC32C is not that of the survey; download it again"
                )
        else:
            content = file.read()
        parse = _parse_python if form.name.endswith("python") else _parse_binary
        batch = parse(form, content, where)
        _check_labels(batch, names, where)
        for row, picture in enumerate(_encoded(batch.data, self.image_format)):
            key = f"{unit['prefix']}-{row:05d}"
            fields: dict[str, Extent | bytes] = {self.image_format: spool.add(picture)}
            if len(names) > 1:
                coarse = batch.labels[0][row]
                fields["json"] = compact(
                    {"coarse_label": coarse, "coarse_name": names[0][coarse]}
                ).encode()
            yield RawSample(
                name=f"{unit['batch']}/{batch.filenames[row]}#{row}" if batch.filenames else key,
                key=key,
                split=unit["prefix"].partition("-")[0],
                label=batch.labels[-1][row],
                image=self.image_format,
                fields=fields,
            )

    def _where(self, name: str = "") -> str:
        if self.archive:
            return f"{self.input.url}/{self.archive}" + (f": {name}" if name else "")
        return f"{self.input.url}/{name}" if name else self.input.url

    def _files(self) -> dict[str, _File]:
        """The files of the data set that are there, by base name, with the contents of those that
        name classes.
        """
        batches = {name for form in self.forms for name in form.batches}
        meta = {column.names_file for form in self.forms for column in form.columns}
        if self.archive:
            stat = stat_or_none(self.input, self.archive)
            if stat is None:
                raise SourceError(f"{self._where()}: not there; found {first_names(self.input)}")
            contents = read_members(RangeFile(self.input, stat), self._where(), batches | meta)
            return {name: _File(stat, content) for name, content in contents.items()}
        stats = {
            name: stat
            for name in sorted(batches | meta)
            if (stat := stat_or_none(self.input, name))
        }
        return {
            name: _File(stat, RangeFile(self.input, stat).read() if name in meta else b"")
            for name, stat in stats.items()
        }


class Cifar10(_Cifar):
    """60,000 pictures of 10 classes; `archive` is its name in `input`, or None if `input` is the
    extracted folder.
    """

    name = "cifar10"
    forms = CIFAR10_FORMS


class Cifar100(_Cifar):
    """60,000 pictures of 100 fine classes, which are the labels; the 20 coarse ones go into a
    `json` field.
    """

    name = "cifar100"
    forms = CIFAR100_FORMS


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


def _class_names(column: Column, content: bytes, where: str) -> list[str]:
    if column.names_field:
        names = _list_field(_fields(content, where), column.names_field, where)
    else:
        names = [line.strip() for line in content.splitlines() if line.strip()]
    texts = [_text(name, where) for name in names]
    if not texts or len(set(texts)) != len(texts):
        raise SourceError(
            f"{where}: {len(texts)} class names, expected some, all different; download it again"
        )
    return texts


def _parse_python(form: Form, content: bytes, where: str) -> CifarBatch:
    fields = _fields(content, where)
    data = fields.get("data")
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != _NUM_VALUES:
        shape = getattr(data, "shape", None)
        raise SourceError(
            f"{where}: array 'data': shape {shape}, expected [rows, {_NUM_VALUES}]; download it"
            " again"
        )
    labels = [_list_field(fields, column.labels_field, where) for column in form.columns]
    filenames = [_text(name, where) for name in _list_field(fields, "filenames", where)]
    if len(filenames) != len(data):
        raise SourceError(
            f"{where}: {len(filenames)} file names for {len(data)} pictures; download it again"
        )
    return CifarBatch(data, labels, filenames)


def _parse_binary(form: Form, content: bytes, where: str) -> CifarBatch:
    num_columns = len(form.columns)
    size = num_columns + _NUM_VALUES
    if len(content) % size or not content:
        raise SourceError(
            f"{where}: {len(content)} bytes, expected a multiple of {size}; it is cut, download it"
            " again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return CifarBatch(
        records[:, num_columns:],
        [records[:, column].tolist() for column in range(num_columns)],
        None,
    )


def _check_labels(batch: CifarBatch, names: list[list[str]], where: str) -> None:
    for labels, column_names in zip(batch.labels, names, strict=True):
        if len(labels) != len(batch.data):
            raise SourceError(
                f"{where}: {len(labels)} labels for {len(batch.data)} pictures; download it again"
            )
        for row, label in enumerate(labels):
            if type(label) is not int or not 0 <= label < len(column_names):
                raise SourceError(
                    f"{where}: row {row}: label {label!r:.40}, expected 0 to"
                    f" {len(column_names) - 1}; the file is damaged, download it again"
                )


def _fields(content: bytes, where: str) -> dict[str, Any]:
    return {_text(key, where): item for key, item in safe_pickle.loads(content, where).items()}


def _list_field(fields: dict[str, Any], field: str, where: str) -> list[Any]:
    value = fields.get(field)
    if not isinstance(value, list):
        raise SourceError(
            f"{where}: no list {field!r} in the pickle; found"
            f" {', '.join(sorted(fields))[:200] or 'nothing'}; download it again, or name the right"
            " --source"
        )
    return value


def _text(value: object, where: str) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return value
    raise SourceError(
        f"{where}: a {type(value).__name__} where a text is expected; download it again"
    )
