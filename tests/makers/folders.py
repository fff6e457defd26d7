"""Makes class folders of small pictures and listings of them."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardset.storage.open import open_storage
from tests.makers.images import image_bytes


def write_images(folder: Path, paths: Iterable[str]) -> Path:
    """A different small picture at each path below the folder, in the format of its extension."""
    for seed, path in enumerate(paths):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image_bytes(seed, file.suffix[1:].lower()))
    return folder


def write_class_folders(
    folder: Path,
    classes: Sequence[str],
    num_images: int,
    *,
    splits: Sequence[str] = (),
    extension: str = "png",
) -> Path:
    """`num_images` pictures in each class folder (of each split, if any), named 000.png, 001.png,
    ...
    """
    tops = [f"{split}/{name}" for split in splits for name in classes] or list(classes)
    return write_images(
        folder, [f"{top}/{number:03d}.{extension}" for top in tops for number in range(num_images)]
    )


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """A CSV file with a header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON value a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def upload(folder: Path, url: str) -> None:
    """Stores all files of a folder below `url`."""
    storage = open_storage(url)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        storage.write(str(path.relative_to(folder)), path.read_bytes())
