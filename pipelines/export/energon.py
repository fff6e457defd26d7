"""Megatron Energon: the folder `.nv-meta` and one `.tar.idx` beside each tar, as `energon prepare`
makes them.
"""

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import yaml

from pipelines.export.base import ShardSet, SideFile, SideFormat, json_bytes
from shardset.errors import ConfigError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.index import index_fields
from shardset.format.manifest import Manifest
from shardset.format.tar import END
from shardset.read.indexes import read_index

META = ".nv-meta"

_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (
    tar_file_id INTEGER, sample_index INTEGER, part_name TEXT,
    content_byte_offset INTEGER, content_byte_size INTEGER);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full
    ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""


def files(shard_set: ShardSet) -> Iterator[SideFile]:
    """The folder's six files and the `.tar.idx` of each shard; reads the indexes, and holds the
    database in memory.
    """
    manifest = shard_set.manifest
    counts = {shard.path: shard.num_samples for shard in manifest.shards}
    parts = {
        name: [shard.path for shard in split.shards] for name, split in manifest.splits.items()
    }
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(_TABLES)
        for number, shard in enumerate(manifest.shards):
            index = read_index(shard_set.storage, shard)
            # Energon wants the first byte of each sample, then the end of the last one.
            ends = np.append(index["offset"], np.uint64(shard.num_bytes - len(END)))
            _add(database, number, shard.index.path, index, ends.astype(np.int64))
            yield SideFile(f"{shard.path}.idx", ends.astype("<u8").tobytes())
        database.executescript(_INDEXES)
        yield SideFile(f"{META}/index.sqlite", database.serialize())
    # From the digest, so that the same set always gets the same UUID.
    yield SideFile(f"{META}/index.uuid", str(uuid.UUID(manifest.digest[:32])).encode())
    yield SideFile(f"{META}/.info.json", json_bytes({"shard_counts": counts}))
    yield SideFile(f"{META}/split.yaml", _yaml({"split_parts": parts, "exclude": []}))
    yield SideFile(f"{META}/dataset.yaml", _yaml(dataset(manifest)))


def dataset(manifest: Manifest) -> dict[str, Any]:
    """What samples become: images with labels where all have one, and otherwise dicts of their raw
    fields.
    """
    fields = dict.fromkeys(field for split in manifest.splits.values() for field in split.fields)
    images = [field for field in fields if field in FIELD_OF_EXTENSION]
    labelled = (sum(split.class_totals) == split.num_samples for split in manifest.splits.values())
    if not images or not all(labelled):
        return {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    return {
        "sample_type": {"__module__": "megatron.energon", "__class__": "ImageClassificationSample"},
        "field_map": {"image": ",".join(images), "label": "cls"},
    }


def _add(
    database: sqlite3.Connection, number: int, where: str, index: np.ndarray, ends: np.ndarray
) -> None:
    """Adds the samples of a shard; `ends` are the first byte of each sample and the end of the last
    one.
    """
    fields = index_fields(index)
    columns = [ends[:-1], np.diff(ends), index["key"], *(index[f".{field}"] for field in fields)]
    samples, parts = [], []
    for position, (offset, size, key, *ranges) in enumerate(
        zip(*map(np.ndarray.tolist, columns), strict=True)
    ):
        samples.append((number, key.decode("ascii"), position, offset, size))
        # The columns of an index need not be in tar order, and absent fields are (0, 0).
        stored = [(field, *each) for field, each in zip(fields, ranges, strict=True) if each[0]]
        parts += [
            (number, position, *member) for member in sorted(stored, key=lambda member: member[1])
        ]
    try:
        database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", samples)
    except sqlite3.IntegrityError as error:
        raise ConfigError(
            f"{where}: a key is there twice, or in a shard before it, and Energon's index needs"
            " each key once; `build --source webdataset` from these tars gives each sample its own"
        ) from error
    database.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
    database.commit()


def _yaml(value: dict[str, Any]) -> bytes:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text.encode()


ENERGON = SideFormat(files=files)
