"""What a data set builder on Beam usually does: image bytes through a GroupByKey. The plain recipe.

python -m benchmarks.peers_beam KIND INPUT OUTPUT

Each sample's hashed key decides its bucket and its place in it, as in TFDS; a bucket becomes one file of records
(length, CRC32C, content).
"""

import hashlib
import os
import struct
import sys
from collections.abc import Iterable, Iterator

import apache_beam as beam
import google_crc32c
from apache_beam.options.pipeline_options import PipelineOptions

from benchmarks.peers_write import LISTINGS, NUM_PROCESSES, NUM_SHARDS, Sample, read

Record = tuple[int, tuple[bytes, int, bytes]]


def read_stretch(samples: list[Sample]) -> Iterator[Record]:
    """(bucket, (hashed key, label, image))."""
    for one in samples:
        hashed = hashlib.md5(one.key.encode()).digest()
        yield int.from_bytes(hashed[:8], "big") * NUM_SHARDS >> 64, (hashed, one.label, read(one))


def write_bucket(group: tuple[int, Iterable[tuple[bytes, int, bytes]]], output: str) -> str:
    """One file of a bucket's records in the order of their hashed keys."""
    number, records = group
    path = f"{output}/train-{number:05d}"
    with open(path, "wb") as file:
        for _, label, image in sorted(records):
            content = struct.pack("<q", label) + image
            file.write(struct.pack("<QI", len(content), google_crc32c.value(content)) + content)
    return path


def main() -> None:
    """Runs the recipe on all cores."""
    kind, folder, output = sys.argv[1:]
    os.makedirs(output, exist_ok=True)
    samples = LISTINGS[kind](folder)
    stretches = [samples[start : start + 100] for start in range(0, len(samples), 100)]
    flags = ["--runner=FnApiRunner", "--direct_running_mode=multi_processing"]
    options = PipelineOptions([*flags, f"--direct_num_workers={NUM_PROCESSES}"])
    with beam.Pipeline(options=options) as pipeline:
        (
            pipeline
            | beam.Create(stretches)
            | beam.Reshuffle()
            | beam.FlatMap(read_stretch)
            | beam.GroupByKey()
            | beam.Map(write_bucket, output)
        )


if __name__ == "__main__":
    main()
