"""Parquet files with values that Python can't hold, and damaged ones: each is a sentence, in both
sources.
"""

import io
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.sources.base import Source
from pipelines.sources.huggingface import HuggingFace
from pipelines.sources.listing import Listing
from shardset.errors import ShardsetError, SourceError
from shardset.storage.open import open_storage
from tests.makers.images import image_bytes
from tests.makers.spools import read

NUM_ROWS = 6


def table(kind: str, **more: pa.Array) -> pa.Table:
    """Rows for either source; `more` are further columns."""
    paths = [f"c/{n}.png" for n in range(NUM_ROWS)]
    images = pa.array([{"bytes": image_bytes(n), "path": path} for n, path in enumerate(paths)])
    first = {"image": images} if kind == "hf" else {"path": pa.array(paths)}
    return pa.table({**first, "label": pa.array(["a", "b"] * (NUM_ROWS // 2)), **more})


def source_of(folder: Path, kind: str) -> Source:
    storage = open_storage(str(folder))
    return HuggingFace(storage, "x.parquet") if kind == "hf" else Listing(storage, "x.parquet")


def texts(*contents: bytes) -> pa.Array:
    """Texts that need not be UTF-8."""
    return pa.array([*contents, *[b"x"] * (NUM_ROWS - len(contents))], pa.binary()).view(
        pa.string()
    )


def numbers(value: int, kind: pa.DataType) -> pa.Array:
    """A last value of a type that is stored as a whole number."""
    return pa.array(
        [0] * (NUM_ROWS - 1) + [value], pa.int32() if kind.bit_width == 32 else pa.int64()
    ).view(kind)


UNHELD = {
    "bad UTF-8": texts(b"ok", b"\xff\xfe"),
    "bad UTF-8 in a list": pa.ListArray.from_arrays(list(range(NUM_ROWS + 1)), texts(b"\xff")),
    "a far day": numbers(10**9, pa.date32()),
    "an unknown time zone": numbers(1, pa.timestamp("us", tz="Europe/Bellin")),
    "a far duration": numbers(1 << 62, pa.duration("ms")),
}


@pytest.mark.parametrize("kind", ["hf", "listing"])
@pytest.mark.parametrize("what", UNHELD)
def test_a_value_that_python_can_t_hold_is_named_by_file_row_group_and_column(tmp_path, kind, what):
    pq.write_table(table(kind, taken=UNHELD[what]), tmp_path / "x.parquet", row_group_size=5)
    group = 1 if "far" in what else 0
    where = re.escape(f"{tmp_path}/x.parquet: row group {group}, column taken: ")
    with pytest.raises(SourceError, match=where):
        read(source_of(tmp_path, kind))


@pytest.mark.parametrize("kind", ["hf", "listing"])
def test_damaged_files_give_samples_or_a_sentence(tmp_path, kind):
    content = io.BytesIO()
    pq.write_table(
        table(kind, taken=UNHELD["a far day"].slice(0, 5).take([0] * NUM_ROWS)),
        content,
        row_group_size=3,
    )
    whole, draw, sentences = content.getvalue(), random.Random(7), []
    footer = int.from_bytes(whole[-8:-4], "little")
    for number in range(60):
        damaged = bytearray(whole)
        start = 4 if number % 2 else len(whole) - footer - 8
        damaged[draw.randrange(start, len(whole))] ^= 1 << draw.randrange(8)
        (tmp_path / "x.parquet").write_bytes(damaged)
        try:
            assert len(read(source_of(tmp_path, kind))) <= NUM_ROWS
        except ShardsetError as error:
            sentences.append(str(error))
    assert len(sentences) > 8
    assert all("\n" not in sentence for sentence in sentences), sentences
