"""Manifests: the golden one is frozen, what is written is read back, and every way to be wrong has
its own sentence.
"""

import hashlib
import json
import re
from contextlib import suppress
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import ManifestError
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest, load, parse, seal, to_json
from shardset.storage.open import open_storage
from tests.makers import golden
from tests.makers.shardset import put

GOLDEN = (golden.FOLDER / "manifest.json").read_bytes()


def value() -> dict[str, Any]:
    """The golden manifest as plain JSON values, free to be spoilt."""
    return json.loads(GOLDEN)


def sealed(spoilt: dict[str, Any]) -> bytes:
    """As a writer would write it that makes the mistake on purpose: the digest fits."""
    try:
        return to_json(seal(msgspec.convert(spoilt, Manifest, dec_hook=manifests.shards_of)))
    except msgspec.ValidationError:
        return json.dumps(spoilt).encode()


def change(spoilt: dict[str, Any], path: str, new: object) -> None:
    """Sets what stands at `splits/train/groups/0/table` and the like."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    holder: Any = spoilt
    for part in parents:
        holder = holder[part]
    holder[last] = new


def test_the_digest_of_the_golden_manifest_is_frozen():
    frozen = "e924df45b0b5367aca34128aca53c891d5473143c3c4d37b8182997746e59c71"
    assert parse(GOLDEN).digest == frozen, golden.REGENERATE


def test_what_is_written_is_read_back_and_written_the_same():
    manifest = parse(GOLDEN)
    assert parse(to_json(manifest)) == manifest
    assert to_json(parse(GOLDEN)) == GOLDEN


def test_the_digest_is_that_of_the_file_without_white_space_its_own_value_and_crcs_of_tables():
    digest = value()["digest"]
    compact = msgspec.json.format(GOLDEN, indent=-1).replace(digest.encode(), b"")
    assert json.loads(compact) == {**value(), "digest": ""}
    blank = re.sub(rb'("table_crc32c":)"[^"]{8}"', rb'\1""', compact)
    assert hashlib.sha256(blank).hexdigest() == digest


def test_totals_of_classes_are_on_one_line_and_texts_are_left_alone():
    odd = value()
    odd["classes"][1]["name"] = "[ 1,\n  2 ]"
    written = sealed(odd)
    assert b'"class_totals": [2, 1],' in written
    assert parse(written).classes[1].name == "[ 1,\n  2 ]"


def test_load_takes_the_file_or_its_folder(tmp_path):
    storage = open_storage(str(tmp_path / "set"))
    put(storage, "manifest.json", GOLDEN)
    for url in (f"{tmp_path}/set", f"{tmp_path}/set/", f"{tmp_path}/set/manifest.json"):
        manifest, found, _ = load(url)
        assert to_json(manifest) == GOLDEN
        assert found.url == storage.url


def test_load_says_that_a_folder_without_a_manifest_holds_no_finished_set(tmp_path):
    with pytest.raises(
        ManifestError,
        match=r"manifest\.json: no manifest there, so no finished shard set; build one",
    ):
        load(str(tmp_path))


def test_a_split_is_found_by_its_name_or_the_others_are_named():
    assert parse(GOLDEN).split("train").mean_bytes == 97 / 4
    with pytest.raises(
        ManifestError, match="no split 'test' in this shard set; it has train, validation"
    ):
        parse(GOLDEN).split("test")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not valid JSON"),
        (GOLDEN[:-40], "not valid JSON"),
        (b"[" * 1100, "expected a shardset manifest"),
        (
            b'{"kind":"shardset","version":1,"x":' + b'{"x":' * 1100,
            "expected a shardset manifest",
        ),
        (b"[]", "expected a shardset manifest of version 1"),
        (b'{"kind": "wids", "version": 1}', "'wids' .*kind.*expected a shardset manifest"),
        (b'{"kind": "shardset", "version": 2}', "2 .*version.*upgrade shardset if a newer one"),
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
        (
            "splits/train/groups/0/seed",
            "7",
            r"Expected `int`, got `str` - at `\$.splits\[...\].groups\[0\].seed`",
        ),
        ("splits", [], r"Expected `object`, got `array` - at `\$.splits`"),
        (
            "splits/train/groups/0/tars_sha256",
            "ab",
            r"regex .* - at `\$.splits\[...\].groups\[0\].tars_sha256`",
        ),
        (
            "splits/train/groups/0/shards",
            "train/train-000000.tar",
            r"regex .* - at .*\.groups\[0\]\.shards`",
        ),
        (
            "splits/train/groups/0/promises",
            ["fast"],
            r"Invalid enum value 'fast' - at .*\.promises\[0\]`",
        ),
        (
            "splits/train/num_dropped",
            -1,
            r"Expected `int` >= 0 - at `\$.splits\[...\].num_dropped`",
        ),
        ("speed", 9, "unknown field `speed`"),
        ("splits/train/groups/0/shards", "/etc/{0..1}.tar", r"path '/etc/\{0\.\.1\}\.tar' leaves"),
        ("splits/train/groups/0/shards", "gs://other/{0..1}.tar", "leaves the manifest's folder"),
        ("splits/train/groups/0/table", "train\\a.npy", "leaves the manifest's folder"),
        ("quarantine/path", "../q.jsonl", "leaves the manifest's folder"),
        (
            "splits/train/groups/0/table",
            "validation/shards.npy",
            r"path 'validation/shards\.npy' is listed twice",
        ),
        ("splits/train/num_samples", 5, "split 'train': num_samples is 5 but its groups hold 4"),
        (
            "splits/train/groups/0/num_shards",
            3,
            r"'train/train-\{000000\.\.000001\}\.tar' names 2 shards, expected 3",
        ),
        ("splits/train/groups/0/num_samples", 1, "1 samples don't fill 2 shards"),
        (
            "splits/train/num_dropped",
            0,
            "4 source samples, 0 dropped and 1 repeats make 5, but num_samples is 4",
        ),
        ("splits/train/class_totals", [4, 1], "class totals add up to 5, but it holds 4 samples"),
        ("splits/train/class_totals", [2], "1 class totals for 2 classes"),
        (
            "splits/train/fields",
            ["ppm", "ppm"],
            r"fields \['ppm', 'ppm'\] can't be a sample's",
        ),
        ("splits/train/fields", ["../x"], "can't be a sample's"),
        ("classes/1/label", 2, "class labels are not 0 to 1 in order"),
        ("splits", {"..": value()["splits"]["validation"]}, r"'\.\.' can't name a split"),
        ("splits/train/groups", [], "num_samples is 4 but its groups hold 0"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_even_if_the_digest_fits(path, new, sentence):
    spoilt = value()
    change(spoilt, path, new)
    with pytest.raises(ManifestError, match=sentence):
        parse(sealed(spoilt))


def test_a_set_without_classes_is_taken():
    spoilt, train = value(), value()["splits"]["train"]
    spoilt.update(classes=[], splits={"train": train | {"class_totals": []}})
    assert parse(sealed(spoilt)).split("train").num_samples == 4


def test_a_wrong_digest_is_refused():
    spoilt = value()
    spoilt["digest"] = "0" * 64
    with pytest.raises(
        ManifestError, match="the content does not fit its digest 000000000000…; restore or rebuild"
    ):
        parse(json.dumps(spoilt).encode())


@settings(deadline=None)
@given(st.integers(0, len(GOLDEN)), st.integers(0, len(GOLDEN)), st.binary(max_size=4))
def test_a_cut_or_a_patch_anywhere_is_refused_or_means_the_same(start, stop, patch):
    with suppress(ManifestError):
        assert parse(GOLDEN[:start] + patch + GOLDEN[stop:]).digest == value()["digest"]


def test_the_published_schema_is_the_one_of_the_code():
    assert golden.SCHEMA.read_bytes() == golden.schema_file(), golden.REGENERATE


def test_the_golden_manifest_fits_the_published_schema():
    schema = json.loads(golden.SCHEMA.read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(value())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({**value(), "version": 2})
