"""Measures decoding of training crops: JPEGs by the distance of their restart markers, PNGs by
level of deflate.

    python -m benchmarks.decoding --write docs/dev/benchmarks/decoding.md

One thread; the best of `--repeats` runs, because other work on the machine only ever adds.
"""

import io
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from benchmarks.environment import show
from benchmarks.measuring import parser_of
from benchmarks.reading import Data
from benchmarks.stream import samples_of
from pipelines.images import restart_markers
from shardset.decode.image import ImageSpec, decode, decode_into, draws
from shardset.format.images import stored_png

NUM_IMAGES = 64
WIDTHS = {
    "a row of blocks": (1 << 16, 1 << 16),
    "64 pixels": (33, 64),
    "32 pixels": (17, 32),
    "16 pixels": (1, 16),
}


def crops_ms(files: Sequence[bytes], repeats: int) -> float:
    """Milliseconds to decode a random resized crop to 224, the mean over images."""
    spec, rows = ImageSpec(size=224), np.arange(len(files))
    drawn, out = draws(spec, 1, 0, rows, rows * 0), np.empty((224, 224, 3), np.uint8)
    jobs = [lambda n=n: decode_into(out, files[n], spec, drawn[n]) for n in range(len(files))]
    return 1e3 * sum(_best_s(job, repeats) for job in jobs) / len(files)


def rewritten(files: Sequence[bytes], least: int, most: int) -> list[bytes]:
    """The files with segments of that many pixels."""
    return [
        restart_markers.add_restart_markers(data, segment_pixels=(least, most)) for data in files
    ]


def jpeg_table(files: Sequence[bytes], repeats: int) -> str:
    """A line for each distance of the markers."""
    total, plain = sum(map(len, files)), crops_ms(files, repeats)
    own = sum(map(len, rewritten(files, 1 << 16, 1 << 16)))
    lines = [
        (
            "| a marker every | bytes, original tables = 1 | own tables, no marker within a row = 1"
            " | ms a crop |"
        ),
        "|---|---|---|---|",
        f"| never (as it was) | 1 | | {plain:.2f} |",
    ]
    for name, (least, most) in WIDTHS.items():
        found = rewritten(files, least, most)
        size = sum(map(len, found))
        lines.append(
            f"| {name} | {size / total:.3f} | {size / own:.3f} | {crops_ms(found, repeats):.2f} |"
        )
    started = time.process_time()
    rewritten(files, *restart_markers.SEGMENT_PIXELS)
    cost = 1e3 * (time.process_time() - started) / len(files)
    lines.append(
        f"\nRewriting an image takes {cost:.1f} ms of a core, comparing its coefficients"
        " included.\n"
    )
    return "\n".join(lines)


def png_table(files: Sequence[bytes], repeats: int) -> str:
    """A line for PNGs as the build makes them, and one for each level of deflate by Pillow."""
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(data))) for data in files])
    lines = [
        "| PNG of 32 x 32 | bytes | in the tar with its label | µs to make | µs to decode |",
        "|---|---|---|---|---|",
        _png_line(
            "not compressed, by the build",
            lambda: stored_png.stored(pixels),
            lambda x: stored_png.pixels(x, 32, 32),
            repeats,
        ),
    ]
    for level in (0, 1, 4, 6, 9):
        make = partial(lambda level: [_png(image, level) for image in pixels], level)
        lines.append(
            _png_line(
                f"level {level} of deflate", make, lambda found: list(map(decode, found)), repeats
            )
        )
    return "\n".join(lines) + "\n"


def _png_line(
    name: str,
    make: Callable[[], list[bytes]],
    decode_all: Callable[[list[bytes]], object],
    repeats: int,
) -> str:
    found = make()
    stored = sum(512 + -(-len(data) // 512) * 512 + 1024 for data in found) / len(found)
    micros = [1e6 * _best_s(job, repeats) / len(found) for job in (make, lambda: decode_all(found))]
    size = sum(map(len, found)) / len(found)
    return f"| {name} | {size:,.0f} | {stored:,.0f} | {micros[0]:.0f} | {micros[1]:.0f} |"


def _png(image: np.ndarray, level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=level)
    return buffer.getvalue()


def _best_s(job: Callable[[], object], repeats: int) -> float:
    return min(timeit.repeat(job, number=1, repeat=repeats))


def main() -> None:
    """Prints the tables, or writes them into the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    cv2.setNumThreads(1)
    files: dict = {
        kind: [
            sample.fields[0][1]
            for sample in samples_of(Data(folder="", kind=kind, num_samples=NUM_IMAGES))
        ]
        for kind in ("jpeg", "png")
    }
    tables = {
        "crops": jpeg_table(files["jpeg"], options.repeats),
        "levels": png_table(files["png"], options.repeats),
    }
    show(tables, options.write)


if __name__ == "__main__":
    main()
