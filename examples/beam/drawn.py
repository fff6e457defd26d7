"""Images that the workers draw become a shard set: shapes of random places and colours.

python -m examples.beam.drawn --number 10000 --output shards
"""

import argparse
import io
from collections.abc import Sequence

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from PIL import Image, ImageDraw

from pipelines import WriteShards
from shardset import Raw

SHAPES = ["ellipse", "rectangle"]
SIZE = 64


def drawn(number: int) -> Raw:
    """The image of that number: the same wherever and however often it is drawn."""
    random = np.random.default_rng(number)
    image = Image.new("RGB", (SIZE, SIZE), tuple(random.integers(256, size=3).tolist()))
    left, top = random.integers(SIZE // 2, size=2).tolist()
    box = (left, top, left + SIZE // 2, top + SIZE // 2)
    shape = SHAPES[number % 2]
    getattr(ImageDraw.Draw(image), shape)(box, fill=tuple(random.integers(256, size=3).tolist()))
    file = io.BytesIO()
    image.save(file, "PNG")
    return Raw(
        key=f"{number:08d}", image=file.getvalue(), label=shape, fields={"json": {"box": box}}
    )


def split_of(raw: Raw) -> str:
    """Every tenth image is for validation."""
    return "val" if raw.key.endswith("0") else "train"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the pipeline."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--output", required=True)
    args, flags = parser.parse_known_args(arguments)
    with beam.Pipeline(options=PipelineOptions(flags)) as pipeline:
        _ = (
            pipeline
            | "Number the images" >> beam.Create(range(args.number))
            | "Spread them over the workers" >> beam.Reshuffle()
            | "Draw" >> beam.Map(drawn)
            | "Write the set" >> WriteShards(args.output, split_of=split_of, classes=SHAPES)
        )


if __name__ == "__main__":
    main()
