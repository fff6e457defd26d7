"""Processor time of a streamed JPEG of 110 KB, in full decodes of it by libjpeg-turbo.

    python -m benchmarks.one_decode [--samples 512] [--rounds 7]

In turns in one process; medians. A run of the stream has several epochs.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import cv2
import numpy as np
import simplejpeg

from benchmarks.measuring import parser_of
from benchmarks.stream import bytes_of, make_data, spec_of, stream_of
from shardset.decode.image import decode_into, draws
from shardset.stream.stream import Stream

NUM_EPOCHS = 6


def main() -> None:
    """Prints a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as place:
        data = make_data("jpeg", Path(place), options.samples, for_all=False)
        files = [path.read_bytes() for path in sorted(Path(place, "files").glob("*/*"))]
        spec, numbers = spec_of(data), np.arange(len(files))
        drawn, row = draws(spec, 1, 0, numbers, numbers * 0), np.empty((224, 224, 3), np.uint8)
        url = f"{place}/shards"

        def decode_all() -> None:
            for file in files:
                simplejpeg.decode_jpeg(file, "RGB")

        def crop_all() -> None:
            for number, file in enumerate(files):
                decode_into(row, file, spec, drawn[number])

        def run(stream: Stream) -> None:
            for _ in stream.run((epoch, range(len(stream))) for epoch in range(NUM_EPOCHS)):
                pass

        whole, read = stream_of(url, data), stream_of(url, data, **bytes_of(data))
        alone = stream_of(url, data, num_threads=1)
        cases: dict[str, tuple[Callable[[], None], int]] = {
            "a full decode": (decode_all, 1),
            "the decode of a crop": (crop_all, 1),
            "the stream": (lambda: run(whole), NUM_EPOCHS),
            "the stream with one thread": (lambda: run(alone), NUM_EPOCHS),
            "the stream, bytes only": (lambda: run(read), NUM_EPOCHS),
        }
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(options.rounds + 1):  # the first one warms up
            for name, (job, times) in cases.items():
                begun = time.process_time()
                job()
                taken[name].append(1e6 * (time.process_time() - begun) / len(files) / times)
    medians = {name: median(found[1:]) for name, found in taken.items()}
    print("| | µs of processor time | full decodes |\n|---|---|---|")
    for name, micros in medians.items():
        print(f"| {name} | {micros:,.0f} | {micros / medians['a full decode']:.2f} |")


if __name__ == "__main__":
    main()
