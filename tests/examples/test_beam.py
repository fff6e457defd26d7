"""The pipelines of examples/beam, on each runner: sets of the same bytes."""

import json
import subprocess
import sys
from pathlib import Path

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.io.gcp.bigquery_avro_tools import get_record_schema_from_dict_table_schema

from tests.makers.built import HERE, verified
from tests.makers.documented import (
    REPOSITORY,
    page,
    python_of,
    run,
    run_all,
    start,
    steps_of,
)
from tests.makers.images import image_bytes
from tests.makers.stored import files_of, samples_of

LOCAL = ["--runner=FnApiRunner", *HERE]
SPECIES = ["cat", "dog", "owl"]

BIGQUERY_SCHEMA = {
    "fields": [
        {"name": "id", "type": "STRING", "mode": "REQUIRED"},
        {
            "name": "photo",
            "type": "RECORD",
            "mode": "NULLABLE",
            "fields": [
                {"name": "jpeg", "type": "BYTES", "mode": "NULLABLE"},
                {"name": "taken", "type": "STRING", "mode": "NULLABLE"},
            ],
        },
        {"name": "label", "type": "INTEGER", "mode": "NULLABLE"},
        {"name": "part", "type": "STRING", "mode": "NULLABLE"},
    ]
}


def example(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs an example, which must succeed."""
    command = [sys.executable, "-m", name, *map(str, words)]
    done = start(command, REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    rows = {
        "id": [f"photo-{number}" for number in range(60)],
        "image": [image_bytes(number) for number in range(60)],
        "species": [SPECIES[number % 3] for number in range(60)],
        "caption": [f"the photo number {number}" for number in range(60)],
    }
    path = tmp_path / "photos.parquet"
    pq.write_table(pa.table(rows), path)
    return path


def test_images_of_parquet_files_in_python_and_in_yaml(parquet, tmp_path):
    example("examples.beam.parquet", f"--input={parquet}", f"--output={tmp_path / 'a'}", *LOCAL)
    manifest = verified(tmp_path / "a")
    assert [info.name for info in manifest.classes] == SPECIES
    samples = samples_of(tmp_path / "a", manifest, "train")
    samples |= samples_of(tmp_path / "a", manifest, "test")
    assert len(samples) == 60
    assert samples["photo-7"] == {
        "png": image_bytes(7),
        "cls": b"1",
        "txt": b"the photo number 7",
    }
    variables = json.dumps({"input": str(parquet), "output": str(tmp_path / "b")})
    file = "--yaml_pipeline_file=examples/beam/shards.yaml"
    example("apache_beam.yaml.main", file, f"--jinja_variables={variables}", *LOCAL)
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")


def test_the_page_writes_what_it_says(parquet, tmp_path):
    text = page("docs/how-to/beam.md", stop="## Read a set in a pipeline")
    [code] = python_of(text)
    run([sys.executable, "-c", code], tmp_path)
    manifest = verified(tmp_path / "drawn")
    assert manifest.splits["train"].shard_sizes == [100] * 9
    places = {"examples/beam/": f"{REPOSITORY}/examples/beam/"}
    [commands] = [block for kind, block in steps_of(text) if kind == "console"]
    run_all(commands.splitlines(), tmp_path, places)
    assert files_of(tmp_path / "shards") == files_of(tmp_path / "shards-2")


def test_images_that_workers_draw(tmp_path):
    example("examples.beam.drawn", "--number=40", f"--output={tmp_path}", *LOCAL)
    manifest = verified(tmp_path)
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {
        "train": 36,
        "val": 4,
    }


def test_rows_of_bigquery_as_it_exports_them(tmp_path):
    rows = [
        {
            "id": f"{number}",
            "photo": {"jpeg": image_bytes(number, "jpg"), "taken": None if number % 2 else "2026"},
            "label": number % 2,
            "part": ["train", "test"][number % 2],
        }
        for number in range(40)
    ]
    schema = get_record_schema_from_dict_table_schema("root", BIGQUERY_SCHEMA)
    with (tmp_path / "000000000000.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), rows)
    output = tmp_path / "out"
    example("examples.beam.bigquery", f"--exported={tmp_path}/*.avro", f"--output={output}", *LOCAL)
    manifest = verified(output)
    assert manifest.splits["test"].num_samples == 20
    stored = samples_of(output, manifest, "train") | samples_of(output, manifest, "test")
    assert stored["3"] == {"jpg": image_bytes(3, "jpg"), "cls": b"1"}
    assert stored["4"] == {"jpg": image_bytes(4, "jpg"), "cls": b"0", "txt": b"2026"}
