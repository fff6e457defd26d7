"""What targets cost: an epoch of images alone, with seven boxes each, and with a mask as well.

python -m benchmarks.targets [--samples 1000] [--rounds 5]

Ratios of rates, in turns in one process; median of the rounds. Wall time needs an idle machine.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import shardset
from benchmarks.measuring import parser_of
from shardset import Boxes, ImageSpec, Mask
from tests.makers.shardset import encode

CASES: dict[str, dict[str, Any]] = {
    "images alone": {},
    "with boxes": {"targets": {"boxes": Boxes("json")}},
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


def main() -> None:
    """Prints a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
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
