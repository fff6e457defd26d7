"""The images of a set get embeddings, as a Parquet file that `shardset column` takes.

python -m examples.beam.embed --set shards --output embedding.parquet
shardset column shards embedding --from embedding.parquet --split train

The model is small and untrained: put your own class and its weights in place of `Embedding`. Flags
of Apache Beam pass through.
"""

import argparse
import io
from collections.abc import Sequence

import apache_beam as beam
import numpy as np
import pyarrow as pa
import torch
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult, RunInference
from apache_beam.ml.inference.pytorch_inference import PytorchModelHandlerTensor
from apache_beam.options.pipeline_options import PipelineOptions
from PIL import Image

from pipelines import ReadShards, StoredRow

SIZE, LENGTH = 32, 8
SCHEMA = pa.schema({"key": pa.string(), "embedding": pa.list_(pa.float32())})


class Embedding(torch.nn.Sequential):
    """Vectors float32 [n, LENGTH] of images float32 [n, 3, SIZE, SIZE]."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(3, 16, kernel_size=4, stride=4),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(16, LENGTH),
        )


def untrained(path: str) -> str:
    """Writes weights to a file, the same each time, and returns its path."""
    torch.manual_seed(0)
    torch.save(Embedding().state_dict(), path)
    return path


def pixels_of(row: StoredRow) -> tuple[str, torch.Tensor]:
    """The key of a sample, and its image: float32 [3, SIZE, SIZE]."""
    [data] = row.fields.values()
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((SIZE, SIZE))
    return row.key, torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def record_of(key: str, result: PredictionResult) -> dict[str, object]:
    """A row of the file."""
    return {"key": key, "embedding": np.asarray(result.inference).tolist()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the pipeline."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", required=True)
    parser.add_argument("--split", default="train")
    parser.add_argument("--field", default="png", help="of the images")
    parser.add_argument("--weights", help="else untrained ones, beside the output")
    parser.add_argument("--output", required=True)
    args, flags = parser.parse_known_args(arguments)
    handler = PytorchModelHandlerTensor(
        state_dict_path=args.weights or untrained(f"{args.output}.pt"),
        model_class=Embedding,
        max_batch_size=64,
    )
    with beam.Pipeline(options=PipelineOptions(flags)) as pipeline:
        _ = (
            pipeline
            | "Read the images" >> ReadShards(args.set, args.split, fields=(args.field,))
            | "Leave out samples without one" >> beam.Filter(lambda row: row.fields)
            | "Decode" >> beam.Map(pixels_of)
            | "Embed" >> RunInference(KeyedModelHandler(handler))
            | "Make records" >> beam.MapTuple(record_of)
            | "Write one file"
            >> beam.io.WriteToParquet(args.output, SCHEMA, num_shards=1, shard_name_template="")
        )


if __name__ == "__main__":
    main()
