"""docs/reference/format.md is right: every field is explained, every example runs."""

import re
import shutil
import sys

import pytest

from shardset.format import manifest as manifests
from shardset.format.naming import MAX_FIELD_BYTES, MAX_KEY_BYTES
from shardset.format.rows import schema_of
from shardset.format.shards import SHARD_DTYPE
from tests.makers import golden
from tests.makers.documented import page, start, steps_of

PAGE = page("docs/reference/format.md")
BLOCKS = steps_of(PAGE)


@pytest.mark.parametrize("record", golden.schema()["$defs"])
def test_every_field_of_the_manifest_is_explained(record):
    for name in golden.schema()["$defs"][record]["properties"]:
        assert f"`{name}`" in PAGE


def test_every_column_of_the_index_is_explained_with_its_type():
    for field in schema_of(["jpg"]):
        assert f"\n| `{field.name}` | `{field.type}` | " in PAGE


def test_every_column_of_the_table_of_shards_is_explained_with_its_type():
    for name, (kind, *_) in SHARD_DTYPE.fields.items():
        text = "V32" if name == "sha256" else kind.str
        assert re.search(rf"^\| `{name}` \| `{text}` \|", PAGE, re.MULTILINE), name


def test_the_limits_are_those_of_the_code():
    assert f"at most {MAX_KEY_BYTES} bytes; no dot" in PAGE
    assert f"inner dots; at most {MAX_FIELD_BYTES} bytes" in PAGE
    assert f"This page is version {manifests.VERSION} of the format" in PAGE


@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_every_example_runs_on_the_golden_set(tmp_path, language, code):
    shutil.copytree(golden.FOLDER, tmp_path / "shards")
    command = [sys.executable, "-c", code] if language == "python" else ["sh", "-e", "-c", code]
    done = start(command, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_page_has_examples_for_tar_and_byte_ranges():
    assert [language for language, _ in BLOCKS] == ["console", "python"]
