"""What a type checker says of a user's own loop."""

import sys

import pytest

from tests.makers.documented import run

LOOP = """
from collections.abc import Iterator
from typing import Any

import numpy as np
import shardset


def transform(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"image": row["image"] / 255, "is_dark": bool(row["image"].mean() < rng.uniform())}


def batches(url: str) -> Iterator[np.ndarray]:
    with shardset.Stream(
        url, "train", batch_size=4, image_size=32, fields=("json",), transform=transform
    ) as stream:
        print(f"{len(stream)} steps an epoch, {stream.classes}")
        for batch in stream:
            images: np.ndarray = batch["image"]
            stored: list[bytes | None] = batch["json"]
            print(stored[0], size_of(batch), batch["is_dark"])
            yield images
        stream.load_state_dict(stream.state_dict())


def size_of(batch: shardset.Batch) -> int:
    return len(batch["label"])


shardset.Stream("photos", "train", batch_size=4, prefetch="2")  # type: ignore[arg-type]
shares = [shardset.Share("photos", "train", 1)]
shardset.MixedStream(  # type: ignore[call-arg]
    shares, global_batch_size=4, rank=0, world_size=1, seed=0, part=range(2)
)
samples = shardset.open("photos", "train")
print(samples[17].key, samples[17].class_name, samples[17].image.shape, samples["cat/000"].fields)
"""


@pytest.mark.slow
def test_mypy_accepts_the_names_of_a_batch_and_refuses_wrong_options(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    flags = "--strict", "--follow-imports=silent", "--cache-dir=cache"
    run([sys.executable, "-m", "mypy", *flags, "loop.py"], tmp_path)
