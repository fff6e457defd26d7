"""The references of shards: each group gathers what belongs to its shards, and nothing else."""

import json
import re
import uuid

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.build import build
from pipelines.plan import layout, paths, references, tables
from pipelines.plan.files import PlanFiles, open_frame
from pipelines.plan.planner import number_duplicates
from pipelines.plan.tables import SampleRow
from shardset.storage.open import open_storage
from tests.makers.built import HERE, config_of
from tests.makers.folders import write_images
from tests.makers.stored import files_of


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    numbers = [f"{number:02d}{'x' * (number % 7)}" for number in range(20)]
    names = [f"{kind}/{number}.png" for kind in ("cat", "dog") for number in numbers]
    return write_images(tmp_path_factory.mktemp("references") / "raw", names)


def references_of(set_, number):
    content = open_frame(
        (set_ / paths.references_path(f"train/train-{number:06d}.tar")).read_bytes()
    ).content
    return tables.from_bytes(content, tables.REFERENCE)


def test_the_plan_of_a_shard_has_no_name_of_another_shards_samples(raw, tmp_path):
    build(config_of(raw, tmp_path / "set", num_shards={"": 8}), HERE)
    names = set[str]()
    for number in range(8):
        table = references_of(tmp_path / "set", number)
        shown = bytes(table["name"].buffers()[2]).decode()
        own = tables.values(table["name"])
        assert {*re.findall(r"(?:cat|dog)/\w+\.png", shown)} == {*own}
        assert table.schema.metadata is None
        names |= {*own}
    assert len(names) == 40


@pytest.mark.parametrize("options", [{}, {"balance": "stratified", "repeat": {"": 3}}])
def test_neither_the_size_of_a_group_nor_that_of_a_batch_changes_a_byte(raw, monkeypatch, options):
    def made():
        url = f"memory://{uuid.uuid4().hex}"
        build(config_of(raw, url, num_shards={"": 8}, **options), HERE)
        return files_of(url)

    expected = made()
    monkeypatch.setattr(layout, "MIN_GROUP", 7)
    monkeypatch.setattr(layout, "MAX_GROUP", 7)
    monkeypatch.setattr(layout, "MAX_PLACEMENTS", 3)
    monkeypatch.setattr(references, "BATCH_ROWS", 3)
    assert made() == expected


def test_samples_that_no_shard_stores_are_listed(raw, tmp_path):
    set_ = tmp_path / "set"
    build(config_of(raw, set_, num_shards={"": 3}, remainder="drop"), HERE)
    dropped = [json.loads(line) for line in (set_ / paths.dropped_path("train")).open()]
    stored = pa.concat_arrays([references_of(set_, number)["name"] for number in range(3)])
    assert len(dropped) == 1
    assert len({*stored.to_pylist(), dropped[0]["name"]}) == 40
    assert dropped[0]["split"] == "train"


@given(st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=5).filter(any))
def test_of_rows_that_want_the_same_key_each_knows_how_many_are_before_it(units):
    output = open_storage(f"memory://{uuid.uuid4().hex}")
    files = PlanFiles(output, "build")
    files.write(paths.BUILD, b"{}")
    for unit, keys in enumerate(units):
        rows = [SampleRow("train", "", str(key), 0, "", "", []) for key in keys]
        files.write(paths.unit_path(unit), tables.to_bytes(tables.unit_table(rows, [])))
    wanted = [key for keys in units for key in keys]
    with pytest.MonkeyPatch.context() as patched:
        for at_once in (100, 3):
            patched.setattr("pipelines.plan.planner.MAX_HASHES", at_once)
            number_duplicates(files, len(units), len(wanted))
            found = [*tables.read_units(files, range(len(units)))]
            occurrences = np.concatenate([table["occurrence"].to_numpy() for table in found])
            expected = [wanted[:row].count(key) for row, key in enumerate(wanted)]
            assert occurrences.tolist() == expected
