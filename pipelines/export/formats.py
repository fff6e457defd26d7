"""The side files of each reader as (path, content), made from the manifest alone.

wids: `wids-SPLIT.json` lists the tars with their sizes, for random access by
`wids.ShardListDataset`, which compares no MD5, so none is listed.

Hugging Face datasets: the header of `README.md` lists the tars of each split and the columns of a
sample.

RF-DETR: `SPLIT-index.json` lists the tars and the categories of COCO.

OpenCLIP: `sizes.json` beside the tars has the samples of each.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

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
"""What `datasets` decodes a field to, by its last extension; None where only the content tells,
bytes for others.
"""


def wids_files(manifest: Manifest, prefix: str) -> Iterator[tuple[str, bytes]]:
    """`wids-SPLIT.json` for each split."""
    for name, split in manifest.splits.items():
        shards = [
            {
                "url": prefix + shard.path,
                "nsamples": shard.num_samples,
                "filesize": shard.num_bytes,
            }
            for shard in split.shards
        ]
        head = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": name}
        yield f"wids-{name}.json", _json(head | {"shardlist": shards})


def hf_files(manifest: Manifest, prefix: str) -> Iterator[tuple[str, bytes]]:
    """`README.md`: the header, and a line for people."""
    import yaml  # a worker lacks it

    for name in manifest.splits:
        if not _SPLIT.fullmatch(name):
            raise ConfigError(
                f"Hugging Face split names are letters, digits and _, not {name!r}; rename the"
                " split"
            )
    patterns = {
        name: sorted({prefix + _NUMBER.sub("*.tar", shard.path) for shard in split.shards})
        for name, split in manifest.splits.items()
    }
    data_files = [{"split": name, "path": paths} for name, paths in patterns.items()]
    header: dict[str, Any] = {"configs": [{"config_name": "default", "data_files": data_files}]}
    features = _features_of(manifest)
    if features is not None:
        splits = [
            {"name": name, "num_bytes": split.num_content_bytes, "num_examples": split.num_samples}
            for name, split in manifest.splits.items()
        ]
        header["dataset_info"] = {"features": features, "splits": splits}
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    words = f"WebDataset shards made from {manifest.provenance.source}, manifest {manifest.digest}."
    yield "README.md", f"---\n{text}---\n\n{words}\n".encode()


def rfdetr_files(manifest: Manifest, prefix: str) -> Iterator[tuple[str, bytes]]:
    """`SPLIT-index.json` for each split; ConfigError for a set without the categories of COCO."""
    categories = [
        {"id": info.category_id, "name": info.name}
        for info in manifest.classes
        if not info.is_group  # which RF-DETR counts as no class
    ]
    ids = [category["id"] for category in categories]
    for name, split in manifest.splits.items():
        if None in ids or not ids or "json" not in split.fields:
            raise ConfigError(
                "rfdetr reads COCO annotations, and this set has none; build it with --source coco"
            )
        index = {
            "version": 1,
            "split": name,
            "shards": [prefix + shard.path for shard in split.shards],
            "num_samples": split.num_samples,
            "categories": categories,
            "annotated_category_ids": ids,
            "category_ids": "remap",
            "samples_per_shard": [shard.num_samples for shard in split.shards],
        }
        yield f"{name}-index.json", _json(index)


def openclip_files(manifest: Manifest, prefix: str) -> Iterator[tuple[str, bytes]]:
    """`sizes.json` in each folder of tars; ConfigError for a split without text."""
    folders = defaultdict[str, dict[str, int]](dict)
    for name, split in manifest.splits.items():
        if {"txt", "json"}.isdisjoint(split.fields):
            raise ConfigError(f"openclip reads txt or json, and split {name!r} has neither")
        for shard in split.shards:
            folder, _, file = shard.path.rpartition("/")
            folders[folder][file] = shard.num_samples
    for folder, sizes in folders.items():
        yield f"{folder}/sizes.json", _json(sizes)


def _json(value: object) -> bytes:
    return f"{json.dumps(value, indent=1)}\n".encode()


def _features_of(manifest: Manifest) -> list[dict[str, Any]] | None:
    """The types of the columns, so that the reader need not guess them from the first samples; None
    if unknown.
    """
    types: dict[str, Any] = {
        field: _KINDS.get(field.rpartition(".")[2], "binary")
        for split in manifest.splits.values()
        for field in split.fields
    }
    if None in types.values():
        return None
    names = {str(info.label): info.name for info in manifest.classes}
    if "cls" in types and len(set(names.values())) == len(names) > 0:
        types["cls"] = {"class_label": {"names": names}}
    types |= {"__key__": "string", "__url__": "string"}
    return [{"name": name, "dtype": kind} for name, kind in types.items()]


FORMATS = {
    "wids": wids_files,
    "hf": hf_files,
    "rfdetr": rfdetr_files,
    "openclip": openclip_files,
}
"""Functions that make a reader's files from a manifest and the prefix that leads to its tars."""
