"""Hugging Face datasets: `README.md`, whose header lists the tars of each split and the columns of
a sample.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from pipelines.export.base import ShardSet, SideFile, SideFormat
from shardset.errors import ConfigError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.manifest import Manifest

_NUMBER = re.compile(r"[0-9]+\.tar$")
_SPLIT = re.compile(r"\w+", re.ASCII)
_KINDS: dict[str, str | None] = {
    **dict.fromkeys(FIELD_OF_EXTENSION, "image"),
    **dict.fromkeys(("txt", "text", "transcript"), "string"),
    **dict.fromkeys(("cls", "cls2", "id", "index", "inx"), "int64"),
    **dict.fromkeys(("json", "jsn"), "json"),
    **dict.fromkeys(
        ("npy", "npz", "ten", "tb", "mp", "msg", "cbor", "pth", "bz2", "gz", "lz4", "xz", "zst")
    ),
}
"""What the library decodes a field to, by its last extension; None where only the content tells,
bytes for others.
"""


def files(shard_set: ShardSet) -> Iterator[SideFile]:
    """`README.md`, from the manifest alone: the header, and a line for people."""
    manifest = shard_set.manifest
    data_files = [
        {
            "split": name,
            "path": sorted(
                {_NUMBER.sub("*.tar", shard_set.address(shard)) for shard in split.shards}
            ),
        }
        for name, split in manifest.splits.items()
    ]
    header: dict[str, Any] = {"configs": [{"config_name": "default", "data_files": data_files}]}
    features = features_of(manifest)
    if features is not None:
        splits = [
            {"name": name, "num_bytes": split.num_content_bytes, "num_examples": split.num_samples}
            for name, split in manifest.splits.items()
        ]
        header["dataset_info"] = {"features": features, "splits": splits}
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    words = f"WebDataset shards made from {manifest.provenance.source}, manifest {manifest.digest}."
    yield SideFile("README.md", f"---\n{text}---\n\n{words}\n".encode())


def check(manifest: Manifest) -> None:
    """Hugging Face's split names are words."""
    for name in manifest.splits:
        if not _SPLIT.fullmatch(name):
            raise ConfigError(
                f"Hugging Face split names are letters, digits and _, not {name!r}; rename the"
                " split"
            )


def features_of(manifest: Manifest) -> list[dict[str, Any]] | None:
    """The types of the columns, so that the reader need not guess them from the first samples; None
    if unknown.
    """
    fields = dict.fromkeys(field for split in manifest.splits.values() for field in split.fields)
    kinds = {field: _KINDS.get(field.rpartition(".")[2], "binary") for field in fields}
    if None in kinds.values():
        return None
    columns: list[dict[str, Any]] = [
        {"name": field, "dtype": kind} for field, kind in kinds.items()
    ]
    names = [info.name for info in manifest.classes]
    if len(set(names)) == len(names) > 0:
        labels = {
            "class_label": {"names": {str(info.label): info.name for info in manifest.classes}}
        }
        columns = [
            {"name": "cls", "dtype": labels} if column["name"] == "cls" else column
            for column in columns
        ]
    return [
        *columns,
        {"name": "__key__", "dtype": "string"},
        {"name": "__url__", "dtype": "string"},
    ]


HF = SideFormat(files=files, takes=("relative paths",), check=check)
