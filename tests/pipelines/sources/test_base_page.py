"""docs/how-to/build.md lists all sources, and the example of docs/dev/sources.md reads MNIST."""

import io
import re
import struct

import numpy as np
import pytest
from PIL import Image

from examples.mnist_source import Mnist
from pipelines.config import SOURCES
from pipelines.sources import OPENERS
from shardset.errors import SourceError
from shardset.storage.open import open_storage
from tests.makers.documented import page
from tests.makers.imagenet import put
from tests.makers.spools import MemorySpool

ROWS = {"train": 5, "t10k": 3}


def test_the_page_has_every_source_that_can_be_opened():
    cells = re.findall(r"^\| (\[?`.*?) \|", page("docs/how-to/build.md"), re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == [*SOURCES] == [*OPENERS]


def digits(prefix: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(ROWS[prefix])
    return random.integers(0, 256, (ROWS[prefix], 6, 4), np.uint8), random.integers(
        0, 10, ROWS[prefix], np.uint8
    )


def idx(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def files() -> dict[str, bytes]:
    found = {}
    for prefix in ROWS:
        images, labels = digits(prefix)
        found |= {
            f"{prefix}-images-idx3-ubyte": idx(images),
            f"{prefix}-labels-idx1-ubyte": idx(labels),
        }
    return found


def everything(source):
    spool = MemorySpool()
    return [entry for unit in source.survey().units for entry in source.index(unit, spool)], spool


def test_the_example_gives_every_digit_with_its_label(tmp_path):
    found, spool = everything(Mnist(open_storage(str(put(tmp_path, files())))))
    for prefix, split in (("train", "train"), ("t10k", "test")):
        images, labels = digits(prefix)
        samples = [sample for sample in found if sample.split == split]
        assert [sample.key for sample in samples] == [
            f"{split}-{row:05d}" for row in range(ROWS[prefix])
        ]
        assert [sample.label for sample in samples] == labels.tolist()
        contents = [spool.content(sample.fields[sample.image]) for sample in samples]
        assert np.array_equal(
            [np.asarray(Image.open(io.BytesIO(content))) for content in contents], images
        )


LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({**files(), LABELS: files()[LABELS][:-1]}, "no whole IDX file"),
        ({**files(), LABELS: idx(np.zeros(9, np.uint8))}, "5 images, 9 labels"),
        ({}, "no train-images-idx3-ubyte; fetch it"),
    ],
)
def test_the_example_refuses_files_that_are_missing_cut_or_do_not_fit(tmp_path, found, says):
    with pytest.raises(SourceError, match=says):
        everything(Mnist(open_storage(str(put(tmp_path, found)))))
