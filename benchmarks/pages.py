"""Measures the report of a shard set: `python -m benchmarks.pages [--folder FOLDER] [--only cifar|folders]`.

Sets of the size of CIFAR-10 (60,000 PNG) and of ImageNet-like JPEGs (10,000 of 110 KB) are built without a page; then
the page is made as a build makes it (4,000 images), and of all images. Each in a process of its own, once.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import environment, inputs, measuring
from pipelines.report.page import IMAGES, IMAGES_AFTER_BUILD

SOURCES = {
    "cifar": ["--source", "cifar10", "--num-shards", "train=50,test=10"],
    "folders": ["--source", "imagenet", "--num-shards", "10"],
}


def timed(words: list[str], folder: Path) -> measuring.Run:
    """One run of `python -m pipelines WORDS`."""
    return measuring.watch([sys.executable, "-m", "pipelines", *words], folder / "nothing", folder / "log", {})


def measure(kind: str, folder: Path) -> None:
    """Prints a row for the build and for each page of a kind of input."""
    raw, out = folder / kind, folder / f"{kind}-set"
    num_images = inputs.make(kind, raw, inputs.FULL_SIZE[kind])
    build = timed(["build", *SOURCES[kind], "--input", str(raw), "--output", str(out), "--no-report"], folder)
    print(f"| {kind}, {num_images:,} images: the build | {build.seconds:.1f} | {build.cpu_s:.1f} | | |", flush=True)
    for images in (0, IMAGES_AFTER_BUILD, IMAGES):
        page = timed(["report", str(out), "--images", str(images)], folder)
        size = (out / "report.html").stat().st_size
        name = f"{kind}: page, {min(images, num_images):,} images decoded"
        print(
            f"| {name} | {page.seconds:.1f} | {page.cpu_s:.1f} | {page.peak_bytes / 1e6:.0f} | {size / 1e6:.2f} |",
            flush=True,
        )


def main() -> int:
    """All rows."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--only", choices=list(SOURCES))
    args = parser.parse_args()
    print(f"{environment.machine()}, commit {environment.commit()}")
    print("| | seconds | processor seconds | peak MB | page, MB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="pages-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in SOURCES if args.only is None else [args.only]:
            measure(kind, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
