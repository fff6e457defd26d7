"""Verification: a sound set passes, and every kind of damage is named."""

import gc
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import google_crc32c
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipelines.check.duplicate_keys import hash_keys
from pipelines.check.problems import Problem
from pipelines.check.verify import VerifyProgress, VerifyReport, render, to_json, verify
from pipelines.report.collect import collect
from shardset.checksum import crc32c_text
from shardset.errors import ManifestError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.index import index_dtype, index_from_bytes, index_to_bytes
from shardset.format.manifest import IndexFile, Manifest, Quarantine, Shard
from shardset.order.permutation import hash64
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.odd_images import BAD, huge_webp
from tests.makers.once import DamagesOnce
from tests.makers.shardset import image_sample, png_samples, publish, put, replace_shards, write_shard_set

_counter = itertools.count()
FIRST, SECOND, TABLE = "train/train-000000.tar", "train/train-000001.tar", "train/shards.npy"


def fresh() -> Storage:
    return open_storage(f"memory://verify-{next(_counter)}/set")


def sound(storage: Storage) -> Manifest:
    """Two splits, 9 and 4 samples of 8 x 8 pixels, two shards each."""
    samples = {"train": png_samples("train", 9, size=8), "val": png_samples("val", 4, size=8)}
    return write_shard_set(storage, samples, num_shards=2)


def listed(manifest: Manifest) -> list[str]:
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return [path for shard in shards for path in (shard.path, shard.index.path)]


def wheres(report: VerifyReport) -> set[str]:
    return {problem.where for problem in report.problems}


def sentences(report: VerifyReport) -> str:
    return "\n".join(f"{problem.where}: {problem.sentence}" for problem in report.problems)


def change_shard(storage: Storage, manifest: Manifest, change: Callable[[Shard], Shard]) -> None:
    """Publishes a manifest that seals the first training shard as changed."""
    train = manifest.splits["train"]
    replace_shards(storage, manifest, "train", [change(train.shards[0]), *train.shards[1:]])


def replace_index(storage: Storage, manifest: Manifest, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Writes the first training shard's index anew, changed, with right checksums everywhere."""
    path = naming.index_path(FIRST)
    data = index_to_bytes(change(index_from_bytes(storage.read(path), path).copy()))
    put(storage, path, data)
    entry = IndexFile(path=path, num_bytes=len(data), crc32c=crc32c_text(google_crc32c.value(data)))
    change_shard(storage, manifest, lambda shard: msgspec.structs.replace(shard, index=entry))


def test_deep_verification_finds_a_row_that_does_not_fit_its_check():
    storage = fresh()
    manifest, path = sound(storage), naming.index_path(FIRST)
    data = storage.read(path)
    data = data[:-1] + bytes([data[-1] ^ 1])
    put(storage, path, data)
    entry = IndexFile(path=path, num_bytes=len(data), crc32c=crc32c_text(google_crc32c.value(data)))
    change_shard(storage, manifest, lambda shard: msgspec.structs.replace(shard, index=entry))
    [problem] = verify(storage.url, deep=True).problems
    assert problem.where == path
    assert problem.sentence.startswith("1 rows do not fit their checks, the first is row 3;")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({}, "takes too much"), ({"decoded_bytes": 1000}, "takes too much"), ({"decoded_bytes": 4 << 30}, "damaged")],
)
def test_images_are_decoded_with_the_memory_that_the_build_was_given(options, sentence):
    # Damaged behind its header: whether its size is refused shows without decoding all of 16,383 x 10,000 pixels.
    storage, damaged = fresh(), huge_webp()[:-8] + b"\xff" * 8
    large = image_sample("train", 0, damaged, "webp", 10)
    manifest = write_shard_set(storage, {"train": [large]}, num_shards=1)
    provenance = msgspec.structs.replace(manifest.provenance, options={"image": options})
    manifest = manifests.seal(msgspec.structs.replace(manifest, provenance=provenance))
    put(storage, naming.MANIFEST, manifests.to_json(manifest))
    for problems in (verify(storage.url, deep=True).problems, collect(manifest, storage, max_images=1).damage):
        assert [f"can't be decoded: {sentence}" in problem.sentence for problem in problems] == [True]


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_set_has_no_problem(deep, tmp_path):
    for storage in (fresh(), open_storage(str(tmp_path))):
        sound(storage)
        report = verify(storage.url, deep=deep)
        assert report.problems == ()
        assert report.ok
        assert (report.num_shards, report.num_samples, report.num_images) == (4, 13, 13 if deep else 0)


def test_deep_verification_reads_every_listed_byte_once():
    storage = fresh()
    manifest = sound(storage)
    report = verify(storage.url, deep=True)
    assert report.num_bytes == sum(storage.stat(path).num_bytes for path in listed(manifest))


def test_a_shallow_look_reads_nothing_where_the_storage_keeps_checksums(tmp_path):
    memory, disk = fresh(), open_storage(str(tmp_path))
    sizes = [sum(s.num_bytes for s in storage.list()) for storage in (memory, disk) if sound(storage)]
    assert verify(memory.url, deep=False).num_bytes == 0
    assert 0 < verify(disk.url, deep=False).num_bytes < sizes[1]


def test_processes_find_what_threads_find(tmp_path):
    storage = open_storage(str(tmp_path))
    sound(storage)
    put(storage, SECOND, b"not a tar" * 100)
    in_threads = verify(storage.url, deep=True)
    assert verify(storage.url, deep=True, min_process_bytes=0) == in_threads
    assert not in_threads.ok


def test_progress_ends_with_everything_done():
    storage = fresh()
    sound(storage)
    seen: list[VerifyProgress] = []
    report = verify(storage.url, deep=True, progress=seen.append)
    assert [step.shards_done for step in seen] == [1, 2, 3, 4]
    assert (seen[-1].num_shards, seen[-1].samples_done, seen[-1].bytes_done) == (4, 13, report.num_bytes)


FLIPPED = fresh()
FLIPPED_MANIFEST = sound(FLIPPED)


@pytest.mark.parametrize("deep", [False, True])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_flip_of_any_bit_of_any_listed_file_is_reported(deep, data):
    path = data.draw(st.sampled_from(listed(FLIPPED_MANIFEST)))
    whole = FLIPPED.read(path)
    position, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[position] ^= 1 << bit
    put(FLIPPED, path, bytes(damaged))
    try:
        report = verify(FLIPPED.url, deep=deep)
    finally:
        put(FLIPPED, path, whole)
    assert any(problem.where.startswith(path) for problem in report.problems)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_flip_of_any_bit_of_the_manifest_is_reported(data):
    whole = FLIPPED.read(naming.MANIFEST)
    position, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[position] ^= 1 << bit
    put(FLIPPED, naming.MANIFEST, bytes(damaged))
    try:
        with pytest.raises(ManifestError):
            verify(FLIPPED.url, deep=False)
    finally:
        put(FLIPPED, naming.MANIFEST, whole)


@pytest.mark.parametrize("deep", [False, True])
def test_a_shard_cut_at_any_block_is_reported(deep):
    storage = fresh()
    sound(storage)
    whole = storage.read(FIRST)
    for size in range(0, len(whole), 512):
        put(storage, FIRST, whole[:size])
        assert FIRST in wheres(verify(storage.url, deep=deep))


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("path", [FIRST, naming.index_path(SECOND), naming.quarantine_path()])
def test_a_missing_file_is_named(path, deep):
    storage = fresh()
    sound(storage)
    storage.delete(path)
    report = verify(storage.url, deep=deep)
    assert [(p.where, "is missing" in p.sentence) for p in report.problems] == [(path, True)]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("path", ["train/train-000002.tar", "val/val-000002.idx.npy", "train/old/x.tar"])
def test_a_tar_or_index_that_the_manifest_does_not_list_is_a_problem(path, deep):
    storage = fresh()
    sound(storage)
    put(storage, path, b"left over")
    report = verify(storage.url, deep=deep)
    assert wheres(report) == {path}
    assert "is not in the manifest" in sentences(report)


def test_other_files_beside_the_shards_are_nobodys_business():
    storage = fresh()
    sound(storage)
    put(storage, "train/README.txt", b"hello")
    put(storage, "elsewhere/a.tar", b"hello")
    assert verify(storage.url, deep=True).ok


@pytest.mark.parametrize("deep", [False, True])
def test_swapped_shards_are_reported_on_both_sides(deep):
    storage = fresh()
    write_shard_set(storage, {"train": png_samples("train", 8, size=8)}, num_shards=2)
    first, second = storage.read(FIRST), storage.read(SECOND)
    put(storage, FIRST, second)
    put(storage, SECOND, first)
    assert {where.partition(",")[0] for where in wheres(verify(storage.url, deep=deep))} == {FIRST, SECOND}


def test_all_problems_are_collected():
    storage = fresh()
    sound(storage)
    storage.delete("val/val-000000.tar")
    storage.delete(naming.index_path(SECOND))
    put(storage, FIRST, b"")
    put(storage, "train/train-000009.tar", b"")
    expected = {"val/val-000000.tar", naming.index_path(SECOND), FIRST, "train/train-000009.tar"}
    assert wheres(verify(storage.url, deep=False)) == expected
    assert wheres(verify(storage.url, deep=True)) == expected


def test_a_label_that_differs_from_the_cls_field_is_found_by_the_deep_look_only():
    storage = fresh()
    samples = png_samples("train", 6, size=8)
    samples[4] = replace(samples[4], label=7)
    write_shard_set(storage, {"train": samples})
    assert verify(storage.url, deep=False).ok
    report = verify(storage.url, deep=True)
    assert wheres(report) == {f"{SECOND}, sample train-000004"}
    assert "the index says label 7, its cls field 4" in sentences(report)


def test_a_label_without_a_cls_field_is_a_problem():
    storage = fresh()
    samples = png_samples("train", 4, size=8)
    samples[1] = replace(samples[1], fields=samples[1].fields[:1])
    write_shard_set(storage, {"train": samples})
    assert "the index says label 1, but its cls field is b'absent'" in sentences(verify(storage.url, deep=True))


def test_samples_without_labels_are_fine():
    storage = fresh()
    samples = [replace(sample, label=-1, fields=sample.fields[:1]) for sample in png_samples("train", 4, size=8)]
    write_shard_set(storage, {"train": samples}, num_classes=0)
    assert verify(storage.url, deep=True).ok


def test_a_label_outside_the_classes_is_a_problem():
    storage = fresh()
    manifest = sound(storage)

    def change(index):
        index["label"][2] = 10
        return index

    replace_index(storage, manifest, change)
    assert "its label is 10, expected one of the 10 classes" in sentences(verify(storage.url, deep=True))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"class_totals": [0, 2, *[1] * 7, 0]}, "split train: holds 1 samples of class 0, the manifest says 0"),
        ({"max_tar_bytes": 5}, "split train: the bytes of its tars, of the largest tar and of the largest index are"),
        ({"num_content_bytes": 5}, "split train: its samples hold"),
    ],
)
def test_totals_of_a_split_that_are_not_those_of_its_shards_are_a_problem(changes, sentence):
    storage = fresh()
    manifest = sound(storage)
    train = msgspec.structs.replace(manifest.splits["train"], **changes)
    publish(storage, msgspec.structs.replace(manifest, splits={**manifest.splits, "train": train}))
    assert sentence in sentences(verify(storage.url, deep=True))


def test_a_table_with_another_sha256_is_a_problem():
    storage = fresh()
    manifest = sound(storage)
    (group,) = manifest.splits["train"].groups
    groups = [msgspec.structs.replace(group, table_sha256="0" * 64)]
    train = msgspec.structs.replace(manifest.splits["train"], shards=groups)
    sealed = manifests.seal(msgspec.structs.replace(manifest, splits={**manifest.splits, "train": train}))
    put(storage, naming.MANIFEST, manifests.to_json(sealed))
    [problem] = verify(storage.url, deep=False).problems
    assert problem == Problem(TABLE, "its SHA-256 is not that of the manifest; restore or rebuild the shard set")


@pytest.mark.parametrize("splits", [("train", "train"), ("train", "val")])
def test_a_key_that_occurs_twice_is_a_problem_also_over_splits(splits):
    storage = fresh()
    samples = {"train": png_samples("train", 6, size=8), "val": png_samples("val", 4, size=8)}
    samples[splits[0]][0] = replace(samples[splits[0]][0], key="twin")
    samples[splits[1]][3] = replace(samples[splits[1]][3], key="twin")
    write_shard_set(storage, samples)
    assert verify(storage.url, deep=False).ok
    report = verify(storage.url, deep=True)
    assert [p.sentence for p in report.problems] == [f"has a sample twin as {FIRST} has; rebuild the set"]


def test_equal_hashes_alone_are_no_twins():
    # The hash takes in eight bytes after the other, so the second eight can make up for other first ones.
    keys = ["train-00twin-one", "00012030QS=Yv3vV"]
    assert len(set(hash_keys(np.array([key.encode() for key in keys])))) == 1
    samples = png_samples("train", 6, size=8)
    for place, key in zip((0, 5), keys, strict=True):
        samples[place] = replace(samples[place], key=key)
    storage = fresh()
    write_shard_set(storage, {"train": samples})
    assert verify(storage.url, deep=True).ok


@pytest.mark.parametrize("name", ["truncated png", "empty", "html", "bomb"])
def test_an_undecodable_image_with_right_checksums_is_found_by_the_deep_look_only(name):
    storage = fresh()
    samples = png_samples("train", 4, size=8)
    samples[2] = image_sample("train", 2, BAD[name][1](), "png", 10)
    write_shard_set(storage, {"train": samples})
    assert verify(storage.url, deep=False).ok
    report = verify(storage.url, deep=True)
    assert wheres(report) == {f"{SECOND}, sample train-000002"}
    assert f"its png can't be decoded: {BAD[name][2]}" in sentences(report)


def test_every_image_of_a_sample_is_decoded_not_only_the_first():
    storage = fresh()
    samples = png_samples("train", 4, size=8)
    samples[3] = replace(samples[3], fields=(*samples[3].fields, ("mask.png", b"no image")))
    write_shard_set(storage, {"train": samples})
    report = verify(storage.url, deep=True)
    assert "its mask.png can't be decoded" in sentences(report)
    assert report.num_images == 5


@pytest.mark.parametrize("column", ["offset", "crc32c", "source", "key", ".png", ".cls"])
def test_an_index_that_disagrees_with_its_tar_is_a_problem_in_every_column(column):
    storage = fresh()
    manifest = sound(storage)

    def change(index):
        index[column][1] = {"key": b"nobody", ".png": (512, 9), ".cls": (0, 0)}.get(column, 99)
        return index

    replace_index(storage, manifest, change)
    report = verify(storage.url, deep=True)
    assert wheres(report) == {f"{FIRST}, sample train-000001"}
    assert f"the index says {column}" in sentences(report)


def test_an_index_of_another_length_is_a_problem():
    storage = fresh()
    manifest = sound(storage)
    replace_index(storage, manifest, lambda index: index[:-1])
    assert "lists 3 samples, the manifest says 4" in sentences(verify(storage.url, deep=True))


def test_an_index_with_columns_of_other_types_is_a_problem_not_a_crash():
    storage = fresh()
    manifest = sound(storage)
    replace_index(
        storage, manifest, lambda i: i.astype([(n, "<f8" if n == "label" else i.dtype[n]) for n in i.dtype.names])
    )
    report = verify(storage.url, deep=True)
    assert wheres(report) == {naming.index_path(FIRST)}
    assert "not those of a shard index" in sentences(report)


@pytest.fixture
def busy_collector() -> Iterator[None]:
    """A garbage collector that runs often, and Python code each time that it does."""
    thresholds = gc.get_threshold()
    gc.callbacks.append(_work)
    gc.set_threshold(50)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(_work)


def _work(*_: object) -> None:
    sum(number for number in range(2000))


@pytest.mark.usefixtures("busy_collector")
def test_indexes_are_read_by_many_threads_at_once():
    # CPython 3.11 fails to build a syntax tree where the collector lets another thread build one meanwhile.
    index = index_to_bytes(np.zeros(3, dtype=index_dtype(["jpg", "cls", "json"], 20)))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: len(index_from_bytes(index, "an index")), range(2000)))
    assert found == [3] * 2000


@pytest.mark.parametrize("deep", [False, True])
def test_damage_that_comes_once_is_no_problem(deep, monkeypatch):
    storage = DamagesOnce(fresh())
    manifest = sound(storage.inner)
    entry = b'{"name": "a.jpg", "split": "train", "reason": "cut"}\n'
    put(storage.inner, manifest.quarantine.path, entry)
    quarantine = msgspec.structs.replace(manifest.quarantine, count=1)
    changed = manifests.seal(msgspec.structs.replace(manifest, quarantine=quarantine))
    put(storage.inner, naming.MANIFEST, manifests.to_json(changed))
    monkeypatch.setattr(manifests, "open_storage", lambda url: storage)
    assert verify(storage.url, deep=deep).problems == ()
    tables = {group.table for split in manifest.splits.values() for group in split.groups}
    assert {*listed(manifest), *tables, naming.MANIFEST, manifest.quarantine.path} == set(storage.damaged)


def test_a_wrong_sha256_is_a_problem():
    storage = fresh()
    manifest = sound(storage)
    change_shard(storage, manifest, lambda shard: msgspec.structs.replace(shard, sha256="0" * 64))
    assert wheres(verify(storage.url, deep=True)) == {FIRST}


def test_a_field_that_the_manifest_does_not_list_is_a_problem():
    storage = fresh()
    manifest = sound(storage)
    train = msgspec.structs.replace(manifest.splits["train"], fields=["png"])
    changed = msgspec.structs.replace(manifest, splits={**manifest.splits, "train": train})
    put(storage, naming.MANIFEST, manifests.to_json(manifests.seal(changed)))
    assert "has a field 'cls', the manifest lists png" in sentences(verify(storage.url, deep=True))


def test_wrong_content_bytes_of_a_split_are_a_problem():
    storage = fresh()
    manifest = sound(storage)
    train = msgspec.structs.replace(manifest.splits["train"], num_content_bytes=1)
    changed = msgspec.structs.replace(manifest, splits={**manifest.splits, "train": train})
    put(storage, naming.MANIFEST, manifests.to_json(manifests.seal(changed)))
    assert wheres(verify(storage.url, deep=True)) == {"split train"}


@pytest.mark.parametrize(
    ("content", "count", "sentence"),
    [
        (b"", 1, "lists 0 samples, the manifest says 1"),
        (b"{}\nrubbish\n", 2, "line 2 is not a JSON object"),
        (b'{}\n["a.png"]\n', 2, "line 2 is not a JSON object"),
    ],
)
def test_a_quarantine_list_that_does_not_fit_is_a_problem(content, count, sentence):
    storage = fresh()
    manifest = sound(storage)
    put(storage, naming.quarantine_path(), content)
    quarantine = Quarantine(count=count, path=naming.quarantine_path())
    changed = manifests.seal(msgspec.structs.replace(manifest, quarantine=quarantine))
    put(storage, naming.MANIFEST, manifests.to_json(changed))
    report = verify(storage.url, deep=False)
    assert wheres(report) == {naming.quarantine_path()}
    assert sentence in sentences(report)


def test_without_a_manifest_there_is_nothing_to_verify():
    with pytest.raises(ManifestError, match="no manifest there"):
        verify(fresh().url, deep=False)


def test_the_report_reads_well_and_its_json_holds_everything():
    storage = fresh()
    sound(storage)
    assert render(verify(storage.url, deep=True)).endswith("13 images decoded: no problem")
    storage.delete(FIRST)
    storage.delete(SECOND)
    report = verify(storage.url, deep=False)
    text = render(report, max_problems=1).splitlines()
    assert text[0] == f"{FIRST}: is missing; restore it, or rebuild the shard with --only-shards"
    assert text[1] == "... and 1 more (all of them with --json)"
    assert text[2].endswith(": 2 problems")
    found = json.loads(to_json(report))
    assert (found["ok"], [problem["where"] for problem in found["problems"]]) == (False, [FIRST, SECOND])


def test_the_hash_of_a_key_does_not_depend_on_the_width_of_its_column():
    keys = [b"a", b"train-000001", b"k" * 100]
    assert hash_keys(np.array(keys[:2])).tolist() == hash_keys(np.array(keys))[:2].tolist()
    words = [int.from_bytes(b"a".ljust(104, b"\0")[at : at + 8], "little") for at in range(0, 104, 8)]
    assert hash_keys(np.array(keys))[0] == hash64(*words)
