"""What targets cost: an epoch of images alone, with seven boxes each, with a mask, and with both.

python -m benchmarks.targets [--samples 1000] [--rounds 5]
python -m benchmarks.targets --label-bytes 2e9

Ratios of rates, in turns in one process; median of the rounds. Wall time needs an idle machine.
With --label-bytes it only builds a set of a COCO file of that size, whose polygons are long, and
prints how much memory the largest process took.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import shardset
from benchmarks.measuring import parser_of, watch
from shardset import Boxes, ImageSpec, Mask
from tests.makers.shardset import encode

CASES: dict[str, dict[str, Any]] = {
    "images alone": {},
    "with boxes": {"targets": {"boxes": Boxes("json")}},
    "with a mask": {"targets": {"mask": Mask("mask.png")}},
    "with boxes and a mask": {"targets": {"boxes": Boxes("json"), "mask": Mask("mask.png")}},
}


def write(folder: str, num_samples: int) -> None:
    """Photographs of 500 x 375, with seven boxes and a mask of as many areas."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (24, 32, 3), np.uint8).repeat(16, 0).repeat(16, 1)[:375, :500]
    with shardset.Writer(folder) as writer:
        for number in range(num_samples):
            corners = rng.integers(0, 300, (7, 2)).tolist()
            boxes = [{"bbox": [*corner, 60, 70], "category_id": 1} for corner in corners]
            mask = np.zeros((375, 500), np.uint8)
            for kind, (left, top) in enumerate(corners):
                mask[top : top + 70, left : left + 60] = kind
            image = np.roll(noise, number, axis=1)
            image = np.clip(image + rng.normal(0, 8, image.shape), 0, 255).astype(np.uint8)
            writer.write(
                image=encode(image, "JPEG", quality=90),
                json={"annotations": boxes},
                fields={"mask.png": encode(mask, "PNG")},
            )


BYTES_EACH = 10_000
"""Of annotations of an image in a drawn COCO file."""


def build_coco(folder: Path, label_bytes: float) -> None:
    """Builds a set of a drawn COCO file, by the command; prints seconds and bytes."""
    pictures, labels, output = folder / "pictures", folder / "labels.json", folder / "set"
    pictures.mkdir()
    images = range(int(label_bytes / BYTES_EACH))
    for number in images:
        image = np.full((8, 8, 3), number % 256, np.uint8)
        (pictures / f"{number}.png").write_bytes(encode(image, "PNG"))
    with labels.open("w") as file:
        for text in _coco(images):
            file.write(text)
    words = f"build --source coco --input {pictures} --annotations {labels} --output {output}"
    command = [sys.executable, "-m", "shardset", *words.split(), "--no-report"]
    run = watch(command, output, folder / "log.txt", {})
    print("| labels, bytes | images | seconds | memory of the largest process, bytes |")
    print(f"|---|---|---|---|\n| {labels.stat().st_size:,} | {len(images):,}", end="")
    print(f" | {run.seconds:.0f} | {run.peak_bytes:,} |")


def _coco(images: range) -> Iterator[str]:
    """The text of a COCO file: annotations first, in no order, ten of each image."""
    polygon = [number / 7 for number in range(BYTES_EACH // 10 // 20)]
    box = {"bbox": [1, 1, 5, 6], "iscrowd": 0, "category_id": 3, "segmentation": [polygon]}
    yield '{"annotations": ['
    for number in range(10 * len(images)):
        comma = "," if number else ""
        yield comma + json.dumps({"id": number, "image_id": number % len(images), **box})
    named = [{"id": number, "file_name": f"{number}.png"} for number in images]
    yield f'], "images": {json.dumps(named)}, "categories": [{{"id": 3, "name": "ox"}}]}}'


def main() -> None:
    """Prints a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--label-bytes", type=float)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if options.label_bytes:
            build_coco(Path(temporary), options.label_bytes)
            return
        url = str(Path(temporary) / "set")
        write(url, options.samples)
        streams = {
            name: shardset.Stream(url, "train", batch_size=50, image=ImageSpec(size=224), **case)
            for name, case in CASES.items()
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
        for _ in range(options.rounds + 1):  # the first one warms up
            for name, stream in streams.items():
                start = time.perf_counter(), time.process_time()
                for _ in stream:
                    pass
                spent = time.perf_counter() - start[0], time.process_time() - start[1]
                taken[name].append(spent)
    medians = {
        name: [median(each[1:]) for each in zip(*spent, strict=True)]
        for name, spent in taken.items()
    }
    wall, cpu = medians["images alone"]
    print("| | images/s | rate | rate by processor time |\n|---|---|---|---|")
    for name, (own_wall, own_cpu) in medians.items():
        rate = options.samples / own_wall
        print(f"| {name} | {rate:,.0f} | {wall / own_wall:.2f} | {cpu / own_cpu:.2f} |")


if __name__ == "__main__":
    main()
