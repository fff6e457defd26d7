"""The shards of a split, from tables of which a reader reads what it touches; damage is read twice,
then refused.
"""

import pickle
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest

from shardset.errors import ManifestError
from shardset.format import manifest as manifests
from shardset.format.manifest import IndexFile, Manifest, Shard, load
from shardset.format.shards import SHARD_DTYPE, WHOLE_ROWS, StoredShards
from shardset.format.table import ROWS_AT_ONCE
from shardset.storage.base import Storage
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from tests.makers.reading import RecordingStorage
from tests.makers.shardset import png_samples, put, replace_shards, write_shard_set

TABLE = "train/shards.npy"
MANY = 40 * WHOLE_ROWS


@pytest.fixture
def storage(tmp_path) -> Storage:
    """A set of shards with 2 or 3 samples, in no order."""
    storage = open_storage(str(tmp_path / "set"))
    write_shard_set(storage, {"train": png_samples("train", 13, size=4)}, num_shards=5)
    return storage


def listed(sizes: list[int]) -> list[Shard]:
    """Shards of these sizes, of which none is stored."""
    index = IndexFile(
        path="", num_bytes=9, crc32c="AAAAAA==", footer_bytes=8, footer_crc32c="AAAAAA=="
    )
    return [
        Shard(
            path="",
            num_samples=size,
            num_bytes=size,
            crc32c="AAAAAA==",
            sha256=f"{n:064x}",
            first_id=0,
            index=index,
        )
        for n, size in enumerate(sizes)
    ]


def many(sizes: list[int]):
    """A storage in memory with the table and the manifest of such shards."""
    inner = MemoryStorage(uuid.uuid4().hex)
    manifest = write_shard_set(inner, {"train": png_samples("train", 1, size=4)}, num_shards=1)
    replace_shards(inner, manifest, "train", listed(sizes))
    storage: Any = RecordingStorage(inner)
    storage.reads_at_once = 4
    return storage


def test_shards_have_the_paths_ids_and_sizes_that_were_written(storage):
    split = load(storage.url).manifest.split("train")
    assert [shard.path for shard in split.shards] == [
        f"train/train-{number:06d}.tar" for number in range(5)
    ]
    assert [shard.index.path for shard in split.shards][1:2] == ["train/train-000001.parquet"]
    assert [shard.num_samples for shard in split.shards] == split.shard_sizes == [2, 3, 2, 3, 3]
    assert [shard.first_id for shard in split.shards] == [0, 2, 5, 7, 10]
    assert [shard.num_bytes for shard in split.shards] == [
        storage.stat(shard.path).num_bytes for shard in split.shards
    ]
    assert split.num_tar_bytes == sum(shard.num_bytes for shard in split.shards)
    assert split.shards[1:3] == [split.shards[1], split.shards[-3]]
    assert (len(split.shards), split.num_shards) == (5, 5)


def test_shards_survive_pickling(storage):
    split = load(storage.url).manifest.split("train")
    again = pickle.loads(pickle.dumps(split))
    assert (again, [*again.shards]) == (split, [*split.shards])


def test_of_many_equal_shards_a_reader_reads_the_rows_that_it_touches():
    storage = many([3] * 5 + [2] * (MANY - 5))
    split = manifests.read(storage).split("train")
    assert [name for name, *_ in storage.reads] == ["manifest.json"]
    assert split.shard_sizes[3:7] == [3, 3, 2, 2]
    assert (split.shards[MANY - 1].first_id, split.shards[MANY - 1].sha256) == (
        2 * MANY + 3,
        f"{MANY - 1:064x}",
    )
    split.shards.load(np.array([0, 1, ROWS_AT_ONCE, MANY - 1, MANY // 2]))
    assert [split.shards[number].num_bytes for number in (4, 5, MANY // 2)] == [3, 2, 2]
    sizes = [stop - start for name, start, stop, _ in storage.reads if name == TABLE]
    assert sorted(sizes) == [size * ROWS_AT_ONCE * SHARD_DTYPE.itemsize for size in (1, 1, 2)]
    assert len([*split.shards]) == MANY


def test_the_table_of_unequal_shards_is_read_at_once():
    storage = many([2, 3, 2])
    assert manifests.read(storage).split("train").shard_sizes == [2, 3, 2]
    assert [name for name, *_ in storage.reads] == ["manifest.json", TABLE]


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_table_that_is_damaged_or_missing_is_a_named_error(is_equal):
    storage = many([2, 2, 2] if is_equal else [2, 3, 2]).inner
    data = storage.read(TABLE)

    def refused(sentence: str) -> None:
        with pytest.raises(ManifestError, match=sentence):
            manifests.read(storage).split("train").shards[0]

    for damaged, sentence in [
        (data[:-1] + b"x", "crc32c is .*, expected .*"),
        (data[:-1], f"{len(data) - 1} bytes, expected {len(data)}"),
    ]:
        put(storage, TABLE, damaged)
        refused(
            rf"^a table of shards is damaged: memory://.*train/shards\.npy: {sentence}; restore or"
            r" rebuild the"
        )
    storage.delete(TABLE)
    refused(r"train/shards\.npy: this table of shards is missing; restore or rebuild the shard set")


def sealed(storage: Storage, manifest: Manifest, **changes: Any) -> None:
    """Writes the manifest with other values in the group of its shards, and a digest that fits."""
    split = manifest.split("train")
    groups = [msgspec.structs.replace(group, **changes) for group in split.groups]
    splits = {"train": msgspec.structs.replace(split, shards=StoredShards(groups))}
    changed = manifests.seal(msgspec.structs.replace(manifest, splits=splits))
    put(storage, "manifest.json", manifests.to_json(changed))


def test_a_table_that_says_something_else_than_the_manifest_is_refused():
    storage = many([2, 3, 2]).inner
    manifest = manifests.read(storage)
    sealed(storage, manifest, promises=["equal"])
    with pytest.raises(
        ManifestError,
        match=r"train/shards\.npy: its shards are not equal, though the manifest says",
    ):
        manifests.read(storage).split("train").shards[0]
    with pytest.raises(
        ManifestError, match="its shards hold 7 samples, at least 0 each; the manifest says 7"
    ):
        replace_shards(storage, manifest, "train", listed([0, 5, 2]))


def test_groups_follow_each_other(storage):
    """As a set has them to which shards were added later."""
    first = manifests.read(storage)
    (group,) = first.split("train").groups
    data, table = storage.read(TABLE), "more/shards.npy"
    put(storage, table, data)
    more = msgspec.structs.replace(group, shards="more/more-{7..11}.tar", table=table)
    split = msgspec.structs.replace(
        first.split("train"),
        shards=StoredShards([group, more]),
        num_samples=26,
        num_source_samples=26,
    )
    manifest = manifests.parse(
        manifests.to_json(manifests.seal(msgspec.structs.replace(first, splits={"train": split})))
    )
    shards = manifests.opened(storage, manifest).split("train").shards
    assert [shards[number].path for number in (4, 5, 9)] == [
        "train/train-000004.tar", "more/more-7.tar", "more/more-11.tar",
    ]  # fmt: skip
    assert [shards[number].first_id for number in (4, 5, 9)] == [10, 13, 23]
