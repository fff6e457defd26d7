"""Verification: a sound set passes, and every kind of damage is named."""

import itertools
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipelines.check import verify as verification
from pipelines.check.verify import VerifyReport, lines, verify
from pipelines.report.collect import collect
from shardset.checksum import crc32c_of, crc32c_text
from shardset.errors import REPAIR, ManifestError
from shardset.format import manifest as manifests
from shardset.format import naming, rows
from shardset.format.manifest import Manifest
from shardset.format.shards import StoredShards
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.odd_images import BAD, encoded, picture
from tests.makers.once import DamagesOnce
from tests.makers.shardset import (
    image_sample,
    png_samples,
    publish,
    put,
    quarantine,
    replace_shards,
    write_shard_set,
)

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


def checked(storage: Storage, *, deep: bool = True) -> VerifyReport:
    return verify(storage.url, deep=deep)


def wheres(report: VerifyReport) -> set[str]:
    return {problem.where for problem in report.problems}


def sentences(report: VerifyReport) -> str:
    return "\n".join(f"{problem.where}: {problem.sentence}" for problem in report.problems)


def change_split(storage: Storage, manifest: Manifest, **changes) -> None:
    """Publishes a manifest whose training split is changed."""
    train = replace(manifest.splits["train"], **changes)
    publish(storage, replace(manifest, splits={**manifest.splits, "train": train}))


def change_shard(storage: Storage, manifest: Manifest, **changes) -> None:
    """Publishes a manifest that seals the first training shard as changed."""
    first, *others = manifest.splits["train"].shards
    replace_shards(storage, manifest, "train", [replace(first, **changes), *others])


def put_index(storage: Storage, manifest: Manifest, change: Callable[[pa.Table], bytes]) -> None:
    """Writes the first training shard's index anew, with right checksums everywhere."""
    path = naming.index_path(FIRST)
    data = change(rows.from_bytes(storage.read(path), 4, path))
    put(storage, path, data)
    first = manifest.splits["train"].shards[0]
    crc32c = crc32c_text(crc32c_of(data))
    entry = replace(first.index, num_bytes=len(data), crc32c=crc32c)
    change_shard(storage, manifest, index=entry)


def change_index(storage: Storage, manifest: Manifest, **values) -> None:
    """The same with values of its second row changed."""

    def changed(index: pa.Table) -> bytes:
        found = index.to_pylist()
        found[1] |= values
        return rows.to_bytes(pa.Table.from_pylist(found, index.schema))

    put_index(storage, manifest, changed)


def change_table(storage: Storage, manifest: Manifest, **changes) -> None:
    """Publishes a manifest whose table of training shards is changed."""
    group = replace(manifest.splits["train"].groups[0], **changes)
    change_split(storage, manifest, shards=StoredShards([group]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({}, "takes too much"), ({"decoded_bytes": 4 << 30}, "damaged")],
)
def test_images_are_decoded_with_the_memory_that_the_build_was_given(
    options, sentence, monkeypatch
):
    monkeypatch.setattr("pipelines.images.options.DECODED_BYTES", 1000)
    whole = encoded(picture(), "WEBP", lossless=True)
    storage, damaged = fresh(), whole[:40] + b"\xff" * (len(whole) - 40)
    sample = image_sample("train", 0, damaged, "webp", 10)
    manifest = write_shard_set(storage, {"train": [sample]}, num_shards=1)
    provenance = replace(manifest.provenance, options={"image": options})
    publish(storage, replace(manifest, provenance=provenance))
    for problems in (
        checked(storage).problems,
        collect(manifests.load(storage.url), max_images=1).damage,
    ):
        assert [f"can't be decoded: {sentence}" in problem.sentence for problem in problems] == [
            True
        ]


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_set_has_no_problem_and_is_read_once_if_at_all(deep, tmp_path):
    for storage in (fresh(), open_storage(str(tmp_path))):
        num_bytes = sum(storage.stat(path).num_bytes for path in listed(sound(storage)))
        put(storage, "train/README.txt", b"a file that is no tar")
        put(storage, "elsewhere/a.tar", b"nobody lists this folder")
        report = checked(storage, deep=deep)
        assert report.ok
        numbers = report.num_shards, report.num_samples, report.num_images
        assert numbers == (4, 13, 13 * deep)
        keeps_checksums = storage.url.startswith("memory")
        assert report.num_bytes == (0 if keeps_checksums and not deep else num_bytes)


def test_processes_find_what_threads_find_and_progress_ends_with_everything_done(
    tmp_path, monkeypatch
):
    storage, seen = open_storage(str(tmp_path)), []
    sound(storage)
    put(storage, SECOND, b"not a tar" * 100)
    in_threads = verify(storage.url, deep=True, progress=lambda *step: seen.append(step))
    monkeypatch.setattr(verification, "MIN_PROCESS_BYTES", 0)
    assert checked(storage) == in_threads
    assert not in_threads.ok
    assert [done for done, *_ in seen] == [1, 2, 3, 4]
    assert seen[-1] == (4, 4, in_threads.num_bytes)


FLIPPED = fresh()
FLIPPED_MANIFEST = sound(FLIPPED)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([naming.MANIFEST, *listed(FLIPPED_MANIFEST)]), st.data())
def test_a_flip_of_any_bit_of_any_file_is_reported(path, data):
    whole = FLIPPED.read(path)
    position, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[position] ^= 1 << bit
    put(FLIPPED, path, bytes(damaged))
    try:
        reports = [verify(FLIPPED.url, deep=deep) for deep in (False, True)]
        found = all(any(where.startswith(path) for where in wheres(one)) for one in reports)
    except ManifestError:
        found = path == naming.MANIFEST
    finally:
        put(FLIPPED, path, whole)
    assert found


@pytest.mark.parametrize("deep", [False, True])
def test_every_file_that_is_missing_changed_or_not_listed_is_named(deep):
    storage = fresh()
    sound(storage)
    missing = {"val/val-000000.tar", naming.index_path(SECOND), naming.quarantine_path()}
    unlisted = {"train/train-000009.tar", "val/val-000002.parquet", "train/old/x.tar"}
    for path in missing:
        storage.delete(path)
    for path in {FIRST, *unlisted}:
        put(storage, path, b"left over")
    report = checked(storage, deep=deep)
    assert wheres(report) == {FIRST, *missing, *unlisted}
    for names, words in ((missing, "is missing"), (unlisted, "is in no version")):
        assert names == {one.where for one in report.problems if words in one.sentence}


SAMPLE = f"{FIRST}, sample train-000001"


INDEX = naming.index_path(FIRST)


@pytest.mark.parametrize(
    ("change", "values", "where", "sentence"),
    [
        *(
            (change_index, {column: value}, SAMPLE, f"the index says {column}")
            for column, value in {
                "crc32c": 99,
                "serial": 99,
                "key": "nobody",
                "png.bytes": 9,
                "cls.offset": None,
                "width": 9,
            }.items()
        ),
        (change_index, {"label": 10}, SAMPLE, "its label is 10, expected one of the 10 classes"),
        (
            put_index,
            {"change": lambda index: rows.to_bytes(index[:-1])},
            INDEX,
            "not a shard index (3 rows, expected 4)",
        ),
        (
            put_index,
            {"change": lambda index: rows.to_bytes(index.drop_columns("label"))},
            INDEX,
            "not a shard index (the columns crc32c, png.offset",
        ),
        (change_shard, {"sha256": "0" * 64}, FIRST, "its SHA-256 is"),
        (
            change_table,
            {"tars_sha256": "0" * 64},
            TABLE,
            "its SHA-256 of tars differs from the manifest's; restore or rebuild the shard set",
        ),
        (change_split, {"fields": ["png"]}, SAMPLE, "has a field 'cls', the manifest lists png"),
        (
            change_split,
            {"class_totals": [0, 2, *[1] * 7, 0]},
            "split train",
            "holds 1 samples of class 0, the manifest says 0",
        ),
        (change_split, {"num_content_bytes": 5}, "split train", "holds 1042 bytes of samples"),
        (
            change_split,
            {"max_tar_bytes": 5},
            "split train",
            "the bytes of its tars and of the largest tar are",
        ),
    ],
)
def test_what_a_set_with_right_checksums_says_wrongly_is_a_problem(change, values, where, sentence):
    storage = fresh()
    change(storage, sound(storage), **values)
    assert f"{where}: {sentence}" in sentences(checked(storage))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_key_that_occurs_twice_is_a_problem_also_over_splits(split):
    samples = {"train": png_samples("train", 6, size=8), "val": png_samples("val", 4, size=8)}
    for name, number in (("train", 0), (split, 3)):
        samples[name][number] = replace(samples[name][number], key="again")
    storage = fresh()
    write_shard_set(storage, samples)
    assert checked(storage, deep=False).ok
    report = checked(storage)
    assert [p.sentence for p in report.problems] == [
        f"has a sample again as {FIRST} has; rebuild the set"
    ]


@pytest.mark.parametrize("name", ["truncated png", "empty", "html", "oversized"])
def test_what_right_checksums_hide_is_found_by_the_deep_look_only(name):
    storage, samples = fresh(), png_samples("train", 8, size=8)
    # has no label, which is fine
    samples[1] = replace(samples[1], label=-1, fields=samples[1].fields[:1])
    samples[4] = replace(samples[4], fields=samples[4].fields[:1])
    samples[5] = replace(samples[5], label=7)
    samples[6] = image_sample("train", 6, BAD[name][1](), "png", 10)
    samples[7] = replace(samples[7], fields=(*samples[7].fields, ("mask.png", b"no image")))
    write_shard_set(storage, {"train": samples})
    assert checked(storage, deep=False).ok
    report = checked(storage)
    assert wheres(report) == {f"{SECOND}, sample train-00000{number}" for number in range(4, 8)}
    assert report.num_images == 9
    for sentence in (
        "the index says label 4, but its cls field is b'absent'",
        "the index says label 7, but its cls field is b'5'",
        f"its png can't be decoded: {BAD[name][2]}",
        "its mask.png can't be decoded",
    ):
        assert sentence in sentences(report)


@pytest.mark.parametrize("deep", [False, True])
def test_damage_that_comes_once_is_no_problem(deep, monkeypatch):
    storage = DamagesOnce(fresh())
    manifest = sound(storage.inner)
    quarantine(storage.inner, manifest, b'{"name": "a.jpg", "split": "train", "reason": "cut"}')
    monkeypatch.setattr(manifests.loading, "open_storage", lambda url: storage)
    assert checked(storage, deep=deep).problems == ()
    tables = {group.table for split in manifest.splits.values() for group in split.groups}
    assert {*listed(manifest), *tables, naming.MANIFEST, manifest.quarantine.path} == set(
        storage.damaged
    )


def test_the_report_reads_well_and_holds_everything():
    storage = fresh()
    with pytest.raises(ManifestError, match="no manifest there"):
        checked(storage, deep=False)
    manifest = sound(storage)
    assert lines(checked(storage))[-1].endswith("13 images decoded: no problem")
    for path in (FIRST, SECOND):
        storage.delete(path)
    report = checked(storage, deep=False)
    assert [problem.where for problem in report.problems] == [FIRST, SECOND]
    first, more, summary = lines(report, max_problems=1)
    assert first == f"{FIRST}: is missing; {REPAIR}"
    assert more == "... and 1 more (all of them with --json)"
    assert summary.endswith(": 2 problems")
    quarantine(storage, manifest, b"{}", b'["a.png"]')
    assert "quarantine.jsonl: line 2 is not a JSON object" in sentences(checked(storage))
    put(storage, naming.quarantine_path(), b"")
    assert "lists 0 samples, the manifest says 2" in sentences(checked(storage))
