"""Makes tiny CIFAR files as they are published: the pickles of Python 2, and the
archives.

write_archive(tmp_path / "cifar-10-python.tar.gz", python_files(cifar10(rows=4)),
folder="cifar-10-batches-py")
"""

import gzip
import io
import pickle
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tests.makers import tars
from tests.makers.tars import plain, special

CIFAR10_CLASSES = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]
COARSE_CLASSES = [f"superclass_{number:02d}" for number in range(20)]
FINE_CLASSES = [f"fine_{number:02d}" for number in range(100)]


@dataclass(frozen=True)
class Batch:
    """One batch file: `data` is uint8 [rows, 3072], planes in the order red, green, blue."""

    file: str
    data: np.ndarray
    labels: list[int]
    coarse: list[int] | None
    filenames: list[str]

    def pixels(self, row: int) -> np.ndarray:
        """The picture of one row: uint8 [32, 32, 3]."""
        return self.data[row].reshape(3, 32, 32).transpose(1, 2, 0)


def batch(file: str, rows: int, num_classes: int, num_coarse: int = 0) -> Batch:
    """Random pictures, the same for the same arguments.

    Two rows have the same file name, as it happens in CIFAR.
    """
    random = np.random.default_rng([rows, *file.encode()])
    data = random.integers(0, 256, (rows, 3072), dtype=np.uint8)
    labels = [int(label) for label in random.integers(0, num_classes, rows)]
    coarse = [label % num_coarse for label in labels] if num_coarse else None
    filenames = [f"picture_s_{max(1, row):06d}.png" for row in range(rows)]
    return Batch(file, data, labels, coarse, filenames)


def cifar10(rows: int = 4) -> list[Batch]:
    """Five training batches and a test batch of `rows` pictures each."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    return [batch(name, rows, 10) for name in names]


def cifar100(rows: int = 4) -> list[Batch]:
    """A training batch of twice `rows` pictures and a test batch of `rows`."""
    return [batch("train", 2 * rows, 100, 20), batch("test", rows, 100, 20)]


def python_files(batches: list[Batch]) -> dict[str, bytes]:
    """The files of a python version, by name."""
    files = {one.file: pickle_of(_batch_value(one)) for one in batches}
    if batches[0].coarse is None:
        meta: dict[str, Any] = {
            "num_cases_per_batch": 10000,
            "label_names": CIFAR10_CLASSES,
            "num_vis": 3072,
        }
        return {**files, "batches.meta": pickle_of(meta), "readme.html": b"<html></html>"}
    return {
        **files,
        "meta": pickle_of({"fine_label_names": FINE_CLASSES, "coarse_label_names": COARSE_CLASSES}),
    }


def write_archive(path: Path, files: dict[str, bytes], folder: str) -> Path:
    """The files under `folder/` in a gzipped tar, with the folder's own entry first."""
    path.write_bytes(gzip.compress(tar_of(files, folder), mtime=0))
    return path


def tar_of(files: dict[str, bytes], folder: str) -> bytes:
    """The files under `folder/` as an uncompressed tar."""
    inside = ((plain(f"{folder}/{name}", content), content) for name, content in files.items())
    return tars.tar_of([(special(folder, tarfile.DIRTYPE), b""), *inside])


def pickle_of(value: Any) -> bytes:
    """What Python 2's cPickle wrote with protocol 2: texts are byte strings, arrays go by
    numpy.core.multiarray.
    """
    buffer = io.BytesIO()
    _Python2Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue().replace(b"numpy._core", b"numpy.core")


class _Python2Pickler(pickle._Pickler):
    def _save_string(self: Any, value: str | bytes) -> None:
        data = value.encode("latin1") if isinstance(value, str) else value
        is_short = len(data) < 256
        size = bytes([len(data)]) if is_short else struct.pack("<i", len(data))
        self.write((pickle.SHORT_BINSTRING if is_short else pickle.BINSTRING) + size + data)
        self.memoize(value)

    dispatch: ClassVar[dict[type, Any]] = {
        **pickle._Pickler.dispatch,
        str: _save_string,
        bytes: _save_string,
    }


def _batch_value(one: Batch) -> dict[str, Any]:
    if one.coarse is None:
        labels: dict[str, Any] = {"labels": one.labels}
    else:
        labels = {"fine_labels": one.labels, "coarse_labels": one.coarse}
    return {
        "batch_label": f"batch {one.file}",
        **labels,
        "data": one.data,
        "filenames": one.filenames,
    }
