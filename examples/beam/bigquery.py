"""The rows of a BigQuery table become a shard set.

python -m examples.beam.bigquery --table my-project:photos.labelled --output gs://bucket/shards
python -m examples.beam.bigquery --exported 'gs://bucket/export/*.avro' --output gs://bucket/shards

The table has `id STRING`, `photo STRUCT<jpeg BYTES, taken STRING>`, `label INT64` and `part
STRING`. Beam reads it by an export in Avro; --exported reads such an export that is there.
"""

import argparse
from collections.abc import Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from pipelines import WriteShards

COLUMNS = {
    "key": "id",
    "image": "photo.jpeg",
    "label": "label",
    "split": "part",
    "txt": "photo.taken",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the pipeline."""
    parser = argparse.ArgumentParser()
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--table")
    place.add_argument("--exported")
    parser.add_argument("--output", required=True)
    args, flags = parser.parse_known_args(arguments)
    rows = (
        beam.io.ReadFromBigQuery(table=args.table)
        if args.table
        else beam.io.ReadFromAvro(args.exported)
    )
    with beam.Pipeline(options=PipelineOptions(flags)) as pipeline:
        _ = (
            pipeline
            | "Read the rows" >> rows
            | "Write the set" >> WriteShards(args.output, columns=COLUMNS, samples_per_shard=10)
        )


if __name__ == "__main__":
    main()
