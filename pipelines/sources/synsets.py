"""ImageNet's classes and validation labels: the ILSVRC2012 development kit, and the tables that
Kaggle ships.
"""

import io
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from pipelines.sources.formats.tar import read_members
from shardset.errors import SourceError

WNID = re.compile(r"n\d{8}", re.ASCII)

_META = "meta.mat"
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_HEAD = "ImageId,PredictionString"
_BROKEN = (
    ValueError,
    TypeError,
    LookupError,
    RuntimeError,
    ArithmeticError,
    MemoryError,
    OSError,
    struct.error,
    zlib.error,
)
"""The errors of loadmat for a file that is not a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synsets:
    """The class names by wnid (first word of the synset), and the wnid of each validation image by
    its file name without extension, such as `ILSVRC2012_val_00000001`.
    """

    names: Mapping[str, str]
    truth: Mapping[str, str]


def read_devkit(file: IO[bytes], where: str) -> Synsets:
    """The synsets of `ILSVRC2012_devkit_t12.tar.gz`; raises SourceError for any other file.

    A validation label there is an ILSVRC2012_ID; they are not in the order of the wnids.
    """
    wanted = (_META, _TRUTH)
    contents = read_members(file, where, wanted)
    if missing := [name for name in wanted if not contents.get(name)]:
        raise SourceError(
            f"{where}: holds no {' and no '.join(missing)}; fetch the devkit of Task 1 and 2"
        )
    leaves = _leaves(contents[_META], f"{where}: {_META}")
    wnids = {str(number): wnid for number, wnid, _ in leaves}
    truth: dict[str, str] = {}
    for number, line in enumerate(contents[_TRUTH].decode("ascii", "replace").split(), start=1):
        if line not in wnids:
            raise SourceError(
                f"{where}: {_TRUTH}: line {number} is {line[:40]!r}, expected an ILSVRC2012_ID of"
                f" {_META}; fetch it again"
            )
        truth[f"ILSVRC2012_val_{number:08d}"] = wnids[line]
    return Synsets(
        names={wnid: words.split(",")[0].strip() for _, wnid, words in leaves}, truth=truth
    )


def read_mapping(text: bytes, where: str) -> dict[str, str]:
    """Names by wnid from `LOC_synset_mapping.txt`: lines `n01440764 tench, Tinca tinca`."""
    lines = enumerate(text.decode("utf-8", "replace").splitlines(), start=1)
    return _pairs(lines, r"(n\d{8}) ([^,]+).*", "nNNNNNNNN name, other name", where)


def read_solution(text: bytes, where: str) -> dict[str, str]:
    """The wnid of each validation image from `LOC_val_solution.csv`: rows
    `ILSVRC2012_val_00000001,n01440764 x y w h`.

    An image may have several boxes; all of them are of one class.
    """
    lines = enumerate(text.decode("utf-8", "replace").splitlines(), start=1)
    if (head := next(lines, (1, ""))[1]) != _HEAD:
        raise SourceError(f"{where}: its head is {head!r:.80}, expected {_HEAD}; fetch it again")
    row = r"(ILSVRC2012_val_\d{8}),(n\d{8})( .*)?"
    truth = _pairs(lines, row, "ILSVRC2012_val_NNNNNNNN,nNNNNNNNN x y w h", where)
    if not truth:
        raise SourceError(f"{where}: holds no row after its head; fetch it again")
    return truth


def _pairs(lines: Iterable[tuple[int, str]], row: str, expected: str, where: str) -> dict[str, str]:
    """The first two groups of each line."""
    pairs: dict[str, str] = {}
    for number, line in lines:
        match = re.fullmatch(row, line.strip(), re.ASCII)
        if not match:
            raise SourceError(
                f"{where}: line {number} is {line!r:.80}, expected {expected}; fetch it again"
            )
        pairs[match[1]] = match[2].strip()
    return pairs


def _leaves(mat: bytes, where: str) -> list[tuple[int, str, str]]:
    """The ILSVRC2012_ID, the wnid and the words of each class without children."""
    from scipy.io import loadmat  # not on the workers, which never read the devkit

    try:
        content: Any = loadmat(io.BytesIO(mat), squeeze_me=True, variable_names=["synsets"])
        leaves = [row for row in np.atleast_1d(content["synsets"]) if int(row["num_children"]) == 0]
        rows = [(int(row["ILSVRC2012_ID"]), str(row["WNID"]), str(row["words"])) for row in leaves]
    except _BROKEN as error:
        raise SourceError(
            f"{where}: no table of synsets ({type(error).__name__}: {error}); fetch it again"
        ) from error
    if not rows or not all(WNID.fullmatch(wnid) for _, wnid, _ in rows):
        raise SourceError(f"{where}: its {len(rows)} classes are not all nNNNNNNNN; fetch it again")
    return rows
