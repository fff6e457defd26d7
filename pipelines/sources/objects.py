"""The content of an input folder, and what a path there tells about an image."""

import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice

from pipelines.sources.base import Extent, RawSample
from shardset.errors import DOCS, ConfigError, SourceError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.program import some_of
from shardset.storage.base import Stat, Storage, stat_or_none
from shardset.storage.open import is_address

UNKNOWN_FIELD = "img"
"""The field of an image whose path does not tell its format; the build corrects it by content."""

_PART = re.compile(r"(.*?)(\d+)-of-(\d{1,6})(?:-[0-9a-f]{16})?(\.\w+)", re.ASCII)

_NOT_LABELS = (
    f"boxes are not labels; {DOCS}/how-to/migrate.md shows how to list them with the images"
)
_ADVICE = {
    r"\.(zip|7z|rar|tgz|tar\.(gz|bz2|xz|zst))": "an archive: unpack it and name the folder",
    r"\.(npy|npz|pt|pth|pkl|pickle|mat|h5|hdf5)|-idx\d-ubyte(\.gz)?": (
        f"arrays: {DOCS}/how-to/migrate.md shows how to write and list their images"
    ),
    r"(^|/)labels/.+\.txt": f"YOLO: {_NOT_LABELS}",
    r"(^|/)annotations/[^/]+\.json|\.coco\.json": "COCO: read by --source coco",
    r"\.parquet": "Parquet: read by --source hf, or by --source listing if it lists paths",
    r"\.(csv|tsv|jsonl|ndjson)": "a table: if it lists images, read it by --source listing",
    r"\.tar": "tars: read by --source webdataset if they have samples, or unpack them",
    rf"\.({'|'.join(FIELD_OF_EXTENSION)})": "images: class folders are --source folder",
}
"""Advice on files by the end of their names, if another source is meant; the first that fits
counts.
"""


def advice_in(folder: Storage, source: str) -> str:
    """`; ` and what to do about a file in a folder that another source or a recipe is for; "" if
    there is none.
    """
    advice = _advice_on([stat.name for stat in islice(folder.list(), 10_000)], source)
    return f"; {advice}" if advice else ""


def refuse_file(path: str, source: str) -> None:
    """Raises ConfigError if the input is a file that the source does not read."""
    advice = _advice_on([path], source)
    if advice and (is_address(path) or os.path.isfile(path)):
        raise ConfigError(f"--source {source} does not read this file: {advice}")


def _advice_on(names: Iterable[str], source: str) -> str:
    for ending, advice in _ADVICE.items():
        alike = [name for name in names if re.search(f"({ending})$", name, re.I)]
        if alike and f"--source {source}" not in advice:
            return f"{printable(alike[0])} looks like {advice}"
    return ""


def refuse_missing_parts(folder: Storage, names: Iterable[str]) -> None:
    """Raises SourceError for parts that names such as `train-00002-of-00004.tar` say are missing,
    and for two exports side by side.
    """
    exports = defaultdict[tuple[str, str], list[tuple[int, int]]](list)
    for name in names:
        if part := _PART.fullmatch(name):
            exports[part[1], part[4]].append((int(part[3]), int(part[2])))
    for (stem, rest), parts in exports.items():
        total = max(parts)[0]
        numbers = {number for num_parts, number in parts if num_parts == total}
        first = int(total in numbers)  # some count from 1
        missing = sorted({*range(first, first + total)} - numbers)
        if missing or len(parts) > total:
            listed = some_of([f"{stem}{number:05d}-of-{total:05d}" for number in missing], 5)
            raise SourceError(
                f"{folder.url}: {len(parts)} files {stem}*{rest} for {total} parts (missing:"
                f" {listed or 'none'}); fetch what is missing and move parts of other exports away,"
                " or take what is there by --allow-missing-parts"
            )


def has_prefix(storage: Storage, prefix: str) -> bool:
    """Whether the name of any object starts with `prefix`."""
    return any(True for _ in storage.list(prefix))


def image_sample(
    name: str, key: str, *, split: str, label: int, content: Extent, extra: str = ""
) -> RawSample:
    """The sample of one image, whose name tells its field, and of its metadata as JSON."""
    image = FIELD_OF_EXTENSION.get(extension(name), UNKNOWN_FIELD)
    fields: dict[str, Extent | bytes] = {image: content}
    if extra:
        fields["json"] = extra.encode()
    return RawSample(name=name, key=key, split=split, label=label, image=image, fields=fields)


def refuse_odd_name(folder: Storage, name: str) -> None:
    """Raises SourceError for the name of a local file that is not text."""
    if not name.isascii() and printable(name) != name:
        raise SourceError(
            f"{folder.url}/{printable(name)}: this name is not valid UTF-8; rename the file"
        )


def stat_of(storage: Storage, name: str, expected: str) -> Stat:
    """The facts about a file of the input; raises SourceError if it is not there."""
    if stat := stat_or_none(storage, name):
        return stat
    raise SourceError(
        f"{storage.url}/{name}: not there, expected {expected}; found {first_names(storage)}"
    )


def first_names(storage: Storage, most: int = 6) -> str:
    """The first names in the folder, for a message."""
    names = [stat.name for stat in islice(storage.list(), most + 1)]
    return some_of(names, most) or "nothing"


def extension(path: str) -> str:
    """The last extension in lower case, without its dot; empty if there is none."""
    return posixpath.splitext(path)[1][1:].lower()


def without_extension(path: str) -> str:
    """The path without its last extension."""
    return posixpath.splitext(path)[0]


def key_of(path: str) -> str:
    """The key of an image that has none: its path or URL, without its extension."""
    return without_extension(path.partition("://")[2] or path).lstrip("/")


def is_hidden(path: str) -> bool:
    """Whether the file or a folder above it starts with a dot."""
    return path.startswith(".") or "/." in path


def printable(path: str) -> str:
    """The path with every byte that is not UTF-8 written as `\\xNN`."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
