"""Manifests of version 2: the same shards as in version 1, from pages that are verified, read twice, then refused."""

import io
import json
import pickle
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from shardset.errors import ManifestError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest, load
from shardset.format.shards import COUNT_DTYPES, PAGE_DTYPE, PagedShards, count_page_bytes
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers import golden
from tests.makers.paged import put_page, to_pages
from tests.makers.shardset import png_samples, put, write_shard_set


@pytest.fixture
def storage(tmp_path) -> Storage:
    storage = open_storage(str(tmp_path / "set"))
    samples = {"train": png_samples("train", 13, size=4), "test": png_samples("test", 5, size=4)}
    write_shard_set(storage, samples, num_shards=5)
    return storage


def plain(shard: Any) -> dict[str, Any]:
    return {**msgspec.structs.asdict(shard), "class_counts": list(shard.class_counts)}


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (4, 2), (100, 100)])
def test_pages_give_the_shards_that_version_1_lists(storage, sizes):
    listed = manifests.read(storage)
    to_pages(storage, shards_per_page=sizes[0], shards_per_count_page=sizes[1])
    paged = manifests.read(storage)
    assert paged.version == 2
    for name, split in listed.splits.items():
        other = paged.split(name)
        assert [*map(plain, other.shards)] == [*map(plain, split.shards)]
        assert plain(other.shards[-1]) == plain(split.shards[-1])
        assert [shard.path for shard in other.shards[1:3]] == [shard.path for shard in split.shards[1:3]]
        for what in ("shard_sizes", "tar_bytes", "index_bytes", "class_totals", "mean_bytes"):
            assert getattr(other, what) == getattr(split, what), what
        blocks = [np.concatenate([*each.count_blocks()]).tolist() for each in (split, other)]
        assert blocks[0] == blocks[1]
    assert {*manifests.files_of(listed)} < {*manifests.files_of(paged)}


def test_a_golden_set_in_pages_is_frozen():
    storage = open_storage("memory://golden-pages")
    for name, data in golden.shard_set_files().items():
        put(storage, name, data)
    to_pages(storage)
    frozen = "e2fe62e2978b7bf15fbb88c109c0df41596bb3c70e51661d939621986528454c"
    assert manifests.read(storage).digest == frozen, golden.REGENERATE


def test_a_paged_manifest_is_written_back_as_it_was_read(storage):
    to_pages(storage)
    data = storage.read(naming.MANIFEST)
    assert manifests.to_json(manifests.read(storage)) == data == manifests.to_json(manifests.parse(data))


def test_a_paged_manifest_fits_the_published_schema_and_a_mixture_of_the_versions_does_not(storage):
    to_pages(storage)
    schema, paged = json.loads(golden.SCHEMA.read_bytes()), json.loads(storage.read(naming.MANIFEST))
    jsonschema.Draft202012Validator(schema).validate(paged)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(paged | {"version": 1})


def test_pages_are_plain_arrays_of_numpy(storage):
    pages = to_pages(storage).splits["train"].shards
    (records, *_), (counts, *_) = (
        [np.load(io.BytesIO(storage.read(page.path)), allow_pickle=False) for page in found]
        for found in (pages.pages, pages.count_pages)
    )
    shard = load(storage.url).manifest.split("train").shards[0]
    assert records.dtype == PAGE_DTYPE
    assert records[0]["sha256"].tobytes().hex() == shard.sha256
    assert counts.dtype in COUNT_DTYPES
    assert counts[0].tolist() == shard.class_counts


@pytest.mark.parametrize(("largest", "size"), [(0, 1), (255, 1), (256, 2), (65536, 4), (2**32, 8)])
def test_a_count_page_has_the_smallest_numbers_that_hold_its_counts(largest, size):
    assert np.load(io.BytesIO(count_page_bytes(np.array([[0, largest]])))).dtype.itemsize == size


def test_shards_are_made_when_they_are_asked_for_and_counts_are_read_when_they_are_used(storage):
    pages = to_pages(storage).splits["train"].shards
    for page in pages.count_pages:
        storage.delete(page.path)
    loaded = load(storage.url).manifest.split("train")
    assert [shard.num_samples for shard in loaded.shards] == loaded.shard_sizes
    assert sum(loaded.class_totals) == loaded.num_samples
    with pytest.raises(ManifestError, match=r"counts\.npy: this page of the manifest is missing; restore or rebuild"):
        list(loaded.shards[0].class_counts)


def test_the_shards_pickle_and_the_counts_of_one_shard_become_a_list(storage):
    to_pages(storage)
    split = load(storage.url).manifest.split("train")
    again = pickle.loads(pickle.dumps(split))
    assert again.shards == split.shards
    assert plain(again.shards[3]) == plain(split.shards[3])
    shard = pickle.loads(pickle.dumps(split.shards[3]))
    assert type(shard.class_counts) is list
    assert shard == split.shards[3]


class DamagedOnce:
    """A storage whose pages come back with a flipped bit the first `times` times; its other objects are sound."""

    def __init__(self, storage: Storage, times: int) -> None:
        self._storage, self.url, self.reads_at_once, self.left = storage, storage.url, 2, times

    def read(self, name: str, *args: Any, **options: Any) -> bytes:
        data = self._storage.read(name, *args, **options)
        if name != naming.MANIFEST and self.left:
            self.left -= 1
            return data[:-1] + bytes([data[-1] ^ 1])
        return data


def test_a_page_that_is_damaged_on_its_way_is_read_again(storage):
    to_pages(storage, shards_per_page=100, shards_per_count_page=100)
    split = manifests.read(DamagedOnce(storage, 1)).split("train")
    assert split.shard_sizes == manifests.read(storage).split("train").shard_sizes


def test_a_page_that_is_damaged_twice_is_a_named_error(storage):
    to_pages(storage)
    sentence = r"a page of the manifest is damaged: .*shards\.npy: .* with crc32c .*, expected .*; restore or rebuild"
    with pytest.raises(ManifestError, match=sentence):
        manifests.read(DamagedOnce(storage, 1000))


def test_a_missing_page_is_a_named_error(storage):
    storage.delete(to_pages(storage).splits["train"].shards.pages[1].path)
    with pytest.raises(ManifestError, match=r"train-00001\.shards\.npy: this page of the manifest is missing"):
        load(storage.url)


def spoilt(storage: Storage, manifest: Manifest, **changes: Any) -> None:
    """Writes a manifest whose train split has other pages than it should, with a digest that fits."""
    train = manifest.splits["train"]
    train = msgspec.structs.replace(train, shards=msgspec.structs.replace(train.shards, **changes))
    sealed = manifests.seal(msgspec.structs.replace(manifest, splits={**manifest.splits, "train": train}))
    put(storage, naming.MANIFEST, manifests.to_json(sealed))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"folder": "../elsewhere"}, "leaves the manifest's folder"),
        ({"pages": []}, r"split 'train': 0 pages and 5 count pages for 5 shards, expected 3 and 5"),
        ({"count_pages": []}, r"3 pages and 0 count pages for 5 shards, expected 3 and 5"),
        ({"shards_per_page": 3}, r"3 pages and 5 count pages for 5 shards, expected 2 and 5"),
        ({"shards_per_page": 0}, r"Expected `int` >= 1 - at `\$.splits\[...\].shards.shards_per_page`"),
        ({"class_counts": [1]}, "1 class counts for 10 classes"),
        ({"class_counts": [99] * 10}, "class counts add up to 990, but it holds 13 samples"),
    ],
)
def test_pages_that_do_not_fit_the_set_are_refused_even_if_the_digest_fits(storage, changes, sentence):
    spoilt(storage, to_pages(storage), **changes)
    with pytest.raises(ManifestError, match=sentence):
        load(storage.url)


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("num_samples", 9, "num_samples is 13 but its shards hold 20"),
        ("num_bytes", 0, "num_samples and num_bytes must be positive"),
        ("index_num_bytes", 0, "num_samples and num_bytes must be positive"),
    ],
)
def test_records_that_do_not_add_up_are_refused_even_if_the_checksums_fit(storage, column, value, sentence):
    manifest = to_pages(storage, shards_per_page=100, shards_per_count_page=100)
    (page,) = manifest.splits["train"].shards.pages
    records = np.load(io.BytesIO(storage.read(page.path)))
    records[column][0] = value
    out = io.BytesIO()
    np.save(out, records)
    spoilt(storage, manifest, pages=[put_page(storage, page.path, out.getvalue())])
    with pytest.raises(ManifestError, match=sentence):
        load(storage.url)


def test_a_page_is_read_whatever_spaces_end_its_header(storage):
    """NumPy's versions differ in how many there are."""
    manifest = to_pages(storage, shards_per_page=100, shards_per_count_page=100)
    (page,) = manifest.splits["train"].shards.pages
    data = storage.read(page.path)
    size = int.from_bytes(data[8:10], "little")
    longer = data[:8] + (size + 64).to_bytes(2, "little") + data[10 : 9 + size] + b" " * 64 + data[9 + size :]
    spoilt(storage, manifest, pages=[put_page(storage, page.path, longer)])
    assert load(storage.url).manifest.split("train").shard_sizes == [2, 3, 2, 3, 3]


def test_a_page_of_another_shape_or_type_is_refused(storage):
    manifest = to_pages(storage, shards_per_page=100, shards_per_count_page=100)
    (page,) = manifest.splits["train"].shards.pages
    for array in (np.zeros(4, PAGE_DTYPE), np.zeros(5, "<u8"), np.zeros((1, 5), PAGE_DTYPE)):
        out = io.BytesIO()
        np.save(out, array)
        spoilt(storage, manifest, pages=[put_page(storage, page.path, out.getvalue())])
        with pytest.raises(ManifestError, match="not the page that the manifest describes, of 5 records"):
            load(storage.url)


@pytest.mark.parametrize("version", [1, 2])
def test_shards_in_the_way_of_the_other_version_are_refused(storage, version):
    manifest = manifests.read(storage) if version == 2 else to_pages(storage)
    other = manifests.seal(msgspec.structs.replace(manifest, version=version))
    with pytest.raises(ManifestError, match=f"its shards are not stored in the way of version {version}"):
        manifests.parse(manifests.to_json(other))


def test_a_set_without_classes_has_no_count_pages(tmp_path):
    storage = open_storage(str(tmp_path))
    write_shard_set(storage, {"train": png_samples("train", 3, size=4)}, num_shards=2)
    listed = manifests.read(storage)
    shards = [msgspec.structs.replace(shard, class_counts=[]) for shard in listed.split("train").shards]
    split = msgspec.structs.replace(listed.split("train"), shards=shards)
    bare = manifests.seal(msgspec.structs.replace(listed, classes=[], splits={"train": split}))
    put(storage, naming.MANIFEST, manifests.to_json(bare))
    to_pages(storage)
    found = manifests.read(storage).split("train")
    assert isinstance(found.shards, PagedShards)
    assert (found.class_totals, found.shards[1].class_counts, [*found.count_blocks()]) == ([], [], [])
