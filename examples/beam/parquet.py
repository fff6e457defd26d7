"""Images in Parquet files become a shard set.

python -m examples.beam.parquet --input 'gs://bucket/photos/*.parquet' --output gs://bucket/shards

The files have the columns `id`, `image` (bytes), `species` and `caption`. Flags of Apache Beam pass
through.
"""

import argparse
from collections.abc import Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from pipelines import WriteShards

COLUMNS = {"key": "id", "image": "image", "label": "species", "txt": "caption"}
SPECIES = ["cat", "dog", "owl"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the pipeline."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True)
    args, flags = parser.parse_known_args(arguments)
    with beam.Pipeline(options=PipelineOptions(flags)) as pipeline:
        _ = (
            pipeline
            | "Read the files" >> beam.io.ReadFromParquet(args.input)
            | "Write the set"
            >> WriteShards(
                args.output, columns=COLUMNS, classes=SPECIES, holdout={"test": 0.1}, num_shards=4
            )
        )


if __name__ == "__main__":
    main()
