"""What to do with input that a source does not read: by what lies there."""

import os
import re
from collections.abc import Sequence
from itertools import islice

from pipelines.sources.objects import extension, printable
from shardset.errors import ConfigError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.storage.base import Storage
from shardset.storage.open import is_address

IN_ONE_FOLDER = "images without class folders, also with labels in their names, are listed as docs/migrate.md shows"

_ADVICE = (
    (r"\.(zip|7z|rar|tgz|tar\.(gz|bz2|xz|zst))", "", "an archive: unpack it and name the folder"),
    (
        r"\.(npy|npz|pt|pth|pkl|pickle|mat|h5|hdf5)|-idx\d-ubyte(\.gz)?",
        "",
        "arrays: docs/migrate.md shows how to write and list their images",
    ),
    (r"(^|/)labels/.+\.txt", "", "YOLO: boxes are no labels; docs/migrate.md shows how to list them with the images"),
    (
        r"(^|/)annotations/[^/]+\.json|\.coco\.json",
        "",
        "COCO: boxes are no labels; docs/migrate.md shows how to list them with the images",
    ),
    (r"\.parquet", "hf listing", "Parquet: read by --source hf, or by --source listing if it lists paths"),
    (r"\.(csv|tsv|jsonl|ndjson)", "listing", "a table: if it lists images, read it by --source listing"),
    (r"\.tar", "webdataset imagenet", "tars: read by --source webdataset if they have samples, or unpack them"),
    (rf"\.({'|'.join(FIELD_OF_EXTENSION)})", "folder listing imagenet", "images: class folders are --source folder"),
)
"""The end of a name, the sources that read such a file, and what to do for any other; the first that fits counts."""


def advice_in(folder: Storage, source: str) -> str:
    """`; ` and what to do about the first thing in a folder that another source or a recipe is for; "" if none is."""
    names = [stat.name for stat in islice(folder.list(), 100_000)]
    others = (name for name in names if extension(name) not in FIELD_OF_EXTENSION)
    advice = _advice_on([*islice(others, 1_000), *names[:1]], source)
    return f"; {advice}" if advice else ""


def refuse_file(path: str, source: str) -> None:
    """Raises ConfigError if the input is a file that the source does not read."""
    advice = _advice_on([path], source)
    if advice and (is_address(path) or os.path.isfile(path)):
        raise ConfigError(f"--source {source} does not read this file: {advice}")


def _advice_on(names: Sequence[str], source: str) -> str:
    for ending, sources, advice in _ADVICE:
        seen = next((name for name in names if re.search(f"({ending})$", name, re.I)), None)
        if seen and source not in sources.split():
            return f"{printable(seen)} looks like {advice}"
    return ""
