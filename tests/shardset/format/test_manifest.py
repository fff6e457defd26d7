"""Manifests: the golden one is frozen, what is written is read back, and every way to be wrong has its own sentence."""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import ConfigError, ManifestError
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest, load, parse, seal, to_json
from shardset.storage.base import Storage
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from tests.makers import golden
from tests.makers.doors import changing
from tests.makers.shardset import put

GOLDEN = (golden.FOLDER / "manifest.json").read_bytes()
DIGITS = [place for place, byte in enumerate(GOLDEN) if chr(byte).isdigit()]


def value() -> dict[str, Any]:
    """The golden manifest as plain JSON values, free to be spoilt."""
    return json.loads(GOLDEN)


def sealed(spoilt: dict[str, Any]) -> bytes:
    """As a writer would write it that makes the mistake on purpose: the digest fits."""
    try:
        return to_json(seal(msgspec.convert(spoilt, Manifest)))
    except msgspec.ValidationError:
        return json.dumps(spoilt).encode()


def change(spoilt: dict[str, Any], path: str, new: object) -> None:
    """Sets what stands at `splits/train/shards/0/path` and the like."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    holder: Any = spoilt
    for part in parents:
        holder = holder[part]
    holder[last] = new


def test_the_golden_manifest_is_frozen():
    assert golden.shard_set_files()["manifest.json"] == GOLDEN, golden.REGENERATE
    frozen = "adabcdbec19ae1ace3454398d786d211906a4360c05566c0ab94013df97710e5"
    assert parse(GOLDEN).digest == frozen, golden.REGENERATE


def test_what_is_written_is_read_back_and_written_the_same():
    manifest = parse(GOLDEN)
    assert parse(to_json(manifest)) == manifest
    assert to_json(parse(GOLDEN)) == GOLDEN


def test_the_digest_is_that_of_the_file_without_its_white_space_and_its_own_value():
    digest = value()["digest"]
    compact = msgspec.json.format(GOLDEN, indent=-1).replace(digest.encode(), b"")
    assert json.loads(compact) == {**value(), "digest": ""}
    assert hashlib.sha256(compact).hexdigest() == digest


def test_counts_of_classes_stand_on_one_line_and_texts_are_left_alone():
    odd = value()
    odd["classes"][1]["name"] = "[ 1,\n  2 ]"
    written = sealed(odd)
    assert b'"class_counts": [1, 1],' in written
    assert parse(written).classes[1].name == "[ 1,\n  2 ]"


def odd_manifests() -> list[Manifest]:
    """Unsealed: several splits, no classes, and texts that look like the places where shards are filled in."""
    spoilt = value()
    spoilt["provenance"]["notes"] = ['"shards":[]', '"shards": []', "[\n 1\n]"]
    spoilt["provenance"]["options"] = {"shards": [], "list": [1, 2, 3]}
    spoilt["splits"]["shards"] = json.loads(json.dumps(spoilt["splits"]["train"]))
    spoilt["splits"]["shards"]["fields"] = ["shards"]
    without_classes = value()
    without_classes["classes"] = []
    for shard in without_classes["splits"]["train"]["shards"]:
        shard["class_counts"] = []
    return [msgspec.convert(one, Manifest) for one in (value(), spoilt, without_classes)]


@pytest.mark.parametrize("manifest", odd_manifests())
def test_a_manifest_written_shard_by_shard_is_the_one_written_at_once(manifest):
    entries = {name: [manifests.entry_of(shard) for shard in split.shards] for name, split in manifest.splits.items()}
    hollow = {name: msgspec.structs.replace(split, shards=[]) for name, split in manifest.splits.items()}
    digest, pieces = manifests.json_of_entries(msgspec.structs.replace(manifest, splits=hollow), entries.__getitem__)
    assert digest == seal(manifest).digest
    assert b"".join(pieces) == to_json(seal(manifest))


def test_a_manifest_written_shard_by_shard_never_holds_two():
    manifest = parse(GOLDEN)
    split, shard = manifest.splits["train"], manifests.entry_of(manifest.splits["train"].shards[0])
    hollow = msgspec.structs.replace(manifest, splits={"train": msgspec.structs.replace(split, shards=[])})
    asked = 0

    def entries(_: str) -> Iterator[bytes]:
        nonlocal asked
        for _ in range(1000):
            asked += 1
            yield shard

    _, pieces = manifests.json_of_entries(hollow, entries)
    assert asked == 1000  # for the digest
    longest = max(map(len, islice(pieces, 500)))
    assert asked < 1500
    assert longest < len(GOLDEN)


class Counting:
    """A storage that counts the bytes that are read."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.url, self.stat, self.num_bytes = storage, storage.url, storage.stat, 0

    def read(self, *args: Any, **options: Any) -> bytes:
        data = self._storage.read(*args, **options)
        self.num_bytes += len(data)
        return data


@pytest.mark.parametrize("manifest", odd_manifests())
def test_a_head_says_what_the_manifest_says(manifest, tmp_path):
    storage, whole = open_storage(str(tmp_path)), seal(manifest)
    put(storage, "manifest.json", to_json(whole))
    head = manifests.read_head(storage)
    assert (head.digest, head.plan_digest, head.quarantine) == (whole.digest, whole.plan_digest, whole.quarantine)


def test_a_head_is_found_in_a_manifest_that_is_laid_out_otherwise(tmp_path):
    storage = open_storage(str(tmp_path))
    put(storage, "manifest.json", GOLDEN)
    head = manifests.read_head(storage)
    put(storage, "manifest.json", json.dumps(value()).encode())
    assert manifests.read_head(storage) == head


@pytest.mark.parametrize("at", [0, GOLDEN.index(b'"plan_digest": "') + 20])
def test_a_bit_that_is_flipped_once_in_the_head_of_a_large_manifest_changes_nothing(at):
    storage, flips = MemoryStorage(uuid.uuid4().hex), iter([1])
    put(storage, "manifest.json", GOLDEN + b" " * 2**20)
    door = changing(
        storage, uuid.uuid4().hex, lambda _, data: data[:at] + bytes([data[at] ^ next(flips, 0)]) + data[at + 1 :]
    )
    assert manifests.read_head(door) == manifests.read_head(storage)
    assert next(flips, None) is None


def test_the_head_of_a_large_manifest_is_read_without_its_shards(tmp_path):
    storage = open_storage(str(tmp_path))
    put(storage, "manifest.json", GOLDEN + b" " * 2**24)
    counting = Counting(storage)
    assert manifests.read_head(counting).digest == parse(GOLDEN).digest
    assert counting.num_bytes < 2**20


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not valid JSON"),
        (b"{}", "not a shardset manifest"),
        (GOLDEN[:-200], None),
        (GOLDEN[:300], "not valid JSON"),
        (GOLDEN.replace(b'"digest"', b'"digits"'), "digest"),
        (GOLDEN.replace(b'"plan_digest": "', b'"plan_digest": "\xff'), "not valid JSON"),
    ],
)
def test_what_is_no_head_is_refused(data, sentence, tmp_path):
    storage = open_storage(str(tmp_path))
    put(storage, "manifest.json", data)
    if sentence is None:  # damage behind the head is found by whoever reads the shards
        assert manifests.read_head(storage).digest == parse(GOLDEN).digest
        return
    with pytest.raises(ManifestError, match=sentence):
        manifests.read_head(storage)


def test_white_space_and_the_order_of_keys_do_not_matter():
    shuffled = {name: value()[name] for name in reversed(value())}
    assert parse(json.dumps(shuffled).encode()) == parse(GOLDEN)


def test_load_takes_the_file_or_its_folder(tmp_path):
    storage = open_storage(str(tmp_path / "set"))
    put(storage, "manifest.json", GOLDEN)
    for url in (f"{tmp_path}/set", f"{tmp_path}/set/", f"{tmp_path}/set/manifest.json"):
        manifest, found = load(url)
        assert manifest == parse(GOLDEN)
        assert found.url == storage.url


def test_load_says_that_a_folder_without_a_manifest_holds_no_finished_set(tmp_path):
    with pytest.raises(ManifestError, match=r"manifest\.json: no manifest there, so no finished shard set; build one"):
        load(str(tmp_path))


@pytest.mark.parametrize("url", ["", "gs://", "memory://"])
def test_load_refuses_what_names_no_folder(url):
    with pytest.raises(ConfigError, match=f"^'{url}' names no storage"):
        load(url)


def test_a_split_is_found_by_its_name_or_the_others_are_named():
    assert parse(GOLDEN).split("train").mean_bytes == 97 / 4
    with pytest.raises(ManifestError, match="no split 'test' in this shard set; it has train, validation"):
        parse(GOLDEN).split("test")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (GOLDEN[:-40], "not valid JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"kind":"shardset","version":1,"x":' + b'{"x":' * 200_000, "nested too deeply"),
        (b"[]", 'expected an object with "kind": "shardset"'),
        (b"{}", 'expected an object with "kind": "shardset"'),
        (b'{"kind": "wids", "version": 1}', 'expected an object with "kind": "shardset"'),
        (b'{"kind": "shardset"}', "version is None, expected a whole number from 1"),
        (b'{"kind": "shardset", "version": true}', "version is True, expected a whole number"),
        (b'{"kind": "shardset", "version": 0}', "version is 0, expected a whole number"),
        (b'{"kind": "shardset", "version": 3}', "version 3 is newer than this program reads .up to 2.; upgrade"),
    ],
)
def test_what_is_no_manifest_of_this_version_is_refused(data, sentence):
    with pytest.raises(ManifestError, match=f"here: .*{sentence}"):
        parse(data, "here")


@pytest.mark.parametrize("name", sorted(value()))
def test_a_missing_field_is_named(name):
    spoilt = value()
    del spoilt[name]
    with pytest.raises(ManifestError, match=name):
        parse(json.dumps(spoilt).encode())


@pytest.mark.parametrize(
    ("path", "new", "sentence"),
    [
        ("seed", "7", r"Expected `int`, got `str` - at `\$.seed`"),
        ("seed", 7.0, r"Expected `int`, got `float` - at `\$.seed`"),
        ("seed", -7, r"Expected `int` >= 0 - at `\$.seed`"),
        ("splits", [], r"Expected `object`, got `array` - at `\$.splits`"),
        ("splits/train/shards/0/sha256", "ab", r"regex .* - at `\$.splits\[...\].shards\[0\].sha256`"),
        ("splits/train/shards/0/crc32c", "AAAA", r"regex .* - at `\$.splits\[...\].shards\[0\].crc32c`"),
        ("splits/train/shards/1/class_counts", [2, -1], r"Expected `int` >= 0"),
        ("splits/train/num_dropped", -1, r"Expected `int` >= 0 - at `\$.splits\[...\].num_dropped`"),
        ("remainder", "keep", r"Invalid enum value 'keep' - at `\$.remainder`"),
        ("speed", 9, "unknown field `speed`"),
        ("classes/0/wnidd", "n1", "unknown field `wnidd`"),
    ],
)
def test_a_wrong_type_or_an_unknown_field_is_named_with_its_place(path, new, sentence):
    spoilt = value()
    change(spoilt, path, new)
    with pytest.raises(ManifestError, match=sentence):
        parse(json.dumps(spoilt).encode())


@pytest.mark.parametrize(
    ("path", "new", "sentence"),
    [
        ("splits/train/shards/0/path", "/etc/passwd", "split 'train': shard '/etc/passwd': path .* is absolute"),
        ("splits/train/shards/0/path", "gs://other/a.tar", "path 'gs://other/a.tar' is absolute"),
        ("splits/train/shards/0/path", "../a.tar", r"path '\.\./a\.tar' leaves the manifest's folder"),
        ("splits/train/shards/1/index/path", "a/../../b", "leaves the manifest's folder"),
        ("splits/train/shards/0/path", "train\\a.tar", "has a backslash or a NUL"),
        ("quarantine/path", "../q.jsonl", "leaves the manifest's folder"),
        ("splits/train/shards/1/path", "train/train-000000.tar", r"path 'train/train-000000\.tar' is listed twice"),
        ("splits/train/shards/1/index/path", "train/train-000000.idx.npy", "npy' is listed twice"),
        ("splits/validation/shards/0/path", "train/train-000000.tar", "is listed twice"),
        ("splits/train/num_samples", 5, "split 'train': num_samples is 5 but its shards hold 4"),
        ("splits/train/num_shards", 3, "split 'train': num_shards is 3 but 2 are listed"),
        (
            "splits/train/num_source_samples",
            5,
            "5 source samples, 1 dropped and 1 repeats make 5, but num_samples is 4",
        ),
        ("splits/train/num_dropped", 0, "4 source samples, 0 dropped and 1 repeats make 5, but num_samples is 4"),
        ("splits/train/shards/1/first_id", 1, r"shard 'train/train-000001\.tar': first_id is 1, expected 2"),
        ("splits/train/shards/0/first_id", 2, r"shard 'train/train-000000\.tar': first_id is 2, expected 0"),
        ("splits/train/shards/0/class_counts", [2, 1], "class counts add up to 3, but it holds 2 samples"),
        ("splits/train/shards/0/class_counts", [2], "1 class counts for 2 classes"),
        ("splits/train/shards/0/num_bytes", 0, "num_samples and num_bytes must be positive"),
        ("splits/train/fields", ["ppm", "ppm"], r"fields \['ppm', 'ppm'\] can't be those of a sample"),
        ("splits/train/fields", [], r"fields \[\] can't be those of a sample"),
        ("splits/train/fields", ["../x"], "can't be those of a sample"),
        ("classes/1/label", 2, "class labels are not 0 to 1 in order"),
        ("splits", {"..": value()["splits"]["validation"]}, r"'\.\.' can't name a split"),
        ("splits/train/shards", [], "num_shards is 2 but 0 are listed"),
    ],
)
def test_what_does_not_add_up_or_leaves_the_folder_is_refused_even_if_the_digest_fits(path, new, sentence):
    spoilt = value()
    change(spoilt, path, new)
    with pytest.raises(ManifestError, match=sentence):
        parse(sealed(spoilt))


@pytest.mark.parametrize(
    ("remainder", "sizes", "sentence"),
    [
        ("spread", (1, 3), "shards hold 1 to 3 samples, expected sizes at most one apart with remainder 'spread'"),
        ("drop", (2, 3), "shards hold 2 to 3 samples, expected sizes all equal with remainder 'drop'"),
        ("pad", (2, 3), "shards hold 2 to 3 samples, expected sizes all equal with remainder 'pad'"),
    ],
)
def test_shards_of_unequal_sizes_are_refused(remainder, sizes, sentence):
    spoilt, train = value(), value()["splits"]["train"]
    for shard, size, first_id in zip(train["shards"], sizes, (0, sizes[0]), strict=True):
        shard.update(num_samples=size, first_id=first_id, class_counts=[1, 0])
    train.update(num_samples=sum(sizes), num_source_samples=sum(sizes))
    spoilt.update(remainder=remainder, splits={"train": train})
    with pytest.raises(ManifestError, match=sentence):
        parse(sealed(spoilt))


def test_shards_one_apart_and_a_set_without_classes_are_taken():
    spoilt, train = value(), value()["splits"]["train"]
    for shard, size, first_id in zip(train["shards"], (3, 2), (0, 3), strict=True):
        shard.update(num_samples=size, first_id=first_id, class_counts=[])
    train.update(num_samples=5, num_source_samples=5)
    spoilt.update(classes=[], splits={"train": train})
    assert parse(sealed(spoilt)).split("train").num_samples == 5


def test_a_wrong_digest_is_refused():
    spoilt = value()
    spoilt["digest"] = "0" * 64
    with pytest.raises(ManifestError, match="the content does not fit its digest 000000000000…; restore or rebuild"):
        parse(json.dumps(spoilt).encode())


def same_or_refused(data: bytes) -> None:
    try:
        assert parse(data) == parse(GOLDEN)
    except ManifestError:
        return


def test_any_other_digit_anywhere_is_refused():
    for place in DIGITS:
        for digit in b"0123456789":
            if digit != GOLDEN[place]:
                with pytest.raises(ManifestError):
                    parse(GOLDEN[:place] + bytes([digit]) + GOLDEN[place + 1 :])


@settings(deadline=None)
@given(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255))
def test_any_other_byte_is_refused_or_means_the_same(place, byte):
    same_or_refused(GOLDEN[:place] + bytes([byte]) + GOLDEN[place + 1 :])


@settings(deadline=None)
@given(st.integers(0, len(GOLDEN)), st.integers(0, len(GOLDEN)), st.binary(max_size=4))
def test_a_cut_or_a_patch_anywhere_is_refused_or_means_the_same(start, stop, patch):
    same_or_refused(GOLDEN[:start] + patch + GOLDEN[stop:])


def test_the_published_schema_is_the_one_of_the_code():
    found = json.loads(golden.SCHEMA.read_bytes())
    assert found == manifests.schema(), f"docs/manifest.schema.json is not schema(); {golden.REGENERATE}"
    assert golden.SCHEMA.read_bytes() == golden.schema_file()


def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(golden.SCHEMA.read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_golden_manifest_fits_the_published_schema():
    validator().validate(value())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest: manifest.pop("seed"),
        lambda manifest: manifest.update(kind="wids"),
        lambda manifest: manifest.update(version=2),
        lambda manifest: manifest.update(digest="x"),
        lambda manifest: manifest.update(speed=1),
        lambda manifest: manifest["splits"]["train"].update(num_shards=-1),
        lambda manifest: manifest["splits"]["train"]["shards"][0].update(crc32c="AAAA"),
    ],
)
def test_the_published_schema_refuses_what_is_no_manifest(spoil: Callable[[dict[str, Any]], object]):
    spoilt = value()
    spoil(spoilt)
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(spoilt)
