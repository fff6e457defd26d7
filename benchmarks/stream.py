"""The stream against webdataset and ImageFolder on identical images, and against what bounds them all.

    python benchmarks/stream.py --kind jpeg --write docs/benchmarks-stream.md

Makes the images from a seed (110 KB JPEGs, or 2 KB PNGs of 32 x 32), runs every contestant in turn `--rounds` times and
prints medians. Every contestant delivers shuffled batches of 256 uint8 or float images to a loop that does nothing.
"""

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
import webdataset
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shardset.storage import open_storage
from tests.makers.shardset import encode, image_sample, write_shard_set
from trainer.decode import ImageSpec, PadCrop, decode, decode_into, draws
from trainer.stream import Stream

BATCH, WORKERS, NUM_CLASSES = 256, 2, 10


@dataclass(frozen=True, slots=True)
class Data:
    """Where the same images lie as shards and as files, and what a training image becomes."""

    shards: str
    folder: str
    field: str
    num_samples: int
    spec: ImageSpec


def make_data(kind: str, root: Path, num_samples: int) -> Data:
    """Writes the images both ways; the same seed gives the same bytes."""
    draw = np.random.default_rng(0)
    photos = load_sample_images().images
    make, field = (_photo, "jpg") if kind == "jpeg" else (_thumbnail, "png")
    samples = [image_sample("train", n, make(photos[n % 2], draw), field, NUM_CLASSES) for n in range(num_samples)]
    write_shard_set(open_storage(str(root / "shards")), {"train": samples}, num_shards=8)
    for sample in samples:
        path = root / "folder" / f"{sample.label:02d}" / f"{sample.key}.{field}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.fields[0][1])
    spec = ImageSpec(size=224, flip=True) if kind == "jpeg" else ImageSpec(size=32, crop=PadCrop(4), flip=True)
    return Data(str(root / "shards"), str(root / "folder"), field, num_samples, spec)


def _photo(photo: np.ndarray, draw: np.random.Generator) -> bytes:
    top, left = draw.integers(0, photo.shape[0] - 375), draw.integers(0, photo.shape[1] - 500)
    noisy = photo[top : top + 375, left : left + 500] + draw.integers(-10, 11, (375, 500, 3))
    return encode(np.clip(noisy, 0, 255).astype(np.uint8), "jpeg", quality=95)


def _thumbnail(photo: np.ndarray, draw: np.random.Generator) -> bytes:
    top, left = draw.integers(0, photo.shape[0] - 100), draw.integers(0, photo.shape[1] - 100)
    return encode(cv2.resize(photo[top : top + 100, left : left + 100], (32, 32), interpolation=cv2.INTER_AREA), "png")


def open_stream(data: Data) -> Stream:
    """The stream as the README shows it."""
    return Stream(data.shards, "train", global_batch_size=BATCH, rank=0, world_size=1, seed=1, image=data.spec)


def ours(data: Data) -> Iterator[int]:
    """The first epoch of a new stream."""
    return (len(batch["id"]) for batch in open_stream(data).epoch(0))


def ours_undecoded(data: Data) -> Iterator[int]:
    """Checked bytes, not decoded."""
    options = {"global_batch_size": BATCH, "rank": 0, "world_size": 1, "seed": 1}
    stream = Stream(data.shards, "train", image=None, fields=(data.field,), **options)
    return (len(batch["id"]) for batch in stream.epoch(0))


def webdataset_documented(data: Data) -> Iterator[int]:
    """webdataset as its documentation shows it: Pillow, a shuffle buffer of 1,000, torchvision, two workers."""
    shards = sorted(str(path) for path in Path(data.shards).glob("train/*.tar"))
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(1000)
        .decode("pil")
        .to_tuple(data.field, "cls")
        .map_tuple(_torchvision(data), int)
        .batched(BATCH)
    )
    return (len(labels) for _, labels in webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS))


def webdataset_undecoded(data: Data) -> Iterator[int]:
    """webdataset in one process, neither decoding nor shuffling."""
    shards = sorted(str(path) for path in Path(data.shards).glob("train/*.tar"))
    return (1 for _ in webdataset.WebDataset(shards, shardshuffle=False))


def image_folder(data: Data) -> Iterator[int]:
    """torchvision's ImageFolder and PyTorch's DataLoader with two workers."""
    loader = DataLoader(ImageFolder(data.folder, _torchvision(data)), BATCH, shuffle=True, num_workers=WORKERS)
    return (len(labels) for _, labels in loader)


def decoding_alone(data: Data) -> Iterator[int]:
    """Decoding and cropping bytes that lie in memory, with two threads: nothing can be faster with these decoders."""
    files = [path.read_bytes() for path in sorted(Path(data.folder).glob("*/*"))]
    rows = np.arange(len(files))
    drawn = draws(data.spec, 1, 0, rows, rows * 0)

    def part(start: int) -> int:
        out = np.empty((data.spec.size, data.spec.size, 3), np.uint8)
        for number in range(start, min(len(files), start + 32)):
            decode_into(out, files[number], data.spec, drawn[number])
        return min(len(files), start + 32) - start

    with ThreadPoolExecutor(WORKERS, initializer=lambda: cv2.setNumThreads(1)) as pool:
        yield 0
        yield from pool.map(part, range(0, len(files), 32))


def reading_alone(data: Data) -> Iterator[int]:
    """Reading every shard front to back."""
    yield 0
    for path in sorted(Path(data.shards).glob("train/*.tar")):
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass
    yield data.num_samples


def _torchvision(data: Data) -> Callable:
    if isinstance(data.spec.crop, PadCrop):
        crop: Callable = transforms.RandomCrop(data.spec.size, padding=data.spec.crop.padding)
    else:
        crop = transforms.RandomResizedCrop(data.spec.size)
    return transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()])


@dataclass(frozen=True, slots=True)
class Result:
    """One run: samples a second, CPU seconds for 1,000 samples (children too), seconds to the first batch."""

    rate: float
    cpu: float
    first: float


def run(contestant: Callable[[Data], Iterator[int]], data: Data) -> Result:
    """One epoch."""
    cpu, begun, first, count = _cpu_s(), time.perf_counter(), 0.0, 0
    for num_samples in contestant(data):
        first = first or time.perf_counter() - begun
        count += num_samples
    return Result(count / (time.perf_counter() - begun), 1000 * (_cpu_s() - cpu) / count, first)


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


CONTESTANTS = {
    "shardset stream, first epoch": ours,
    "webdataset as documented": webdataset_documented,
    "ImageFolder and DataLoader": image_folder,
    "decoding alone, two threads": decoding_alone,
    "shardset stream, not decoded": ours_undecoded,
    "webdataset, not decoded": webdataset_undecoded,
    "reading the bytes in order": reading_alone,
}


def table(results: dict[str, list[Result]]) -> str:
    """Medians in Markdown."""
    head = "| reader | samples/s | CPU s per 1,000 | first batch, s |\n|---|---|---|---|\n"
    lines = []
    for name, found in results.items():
        rate, cpu, first = (statistics.median(getattr(one, what) for one in found) for what in ("rate", "cpu", "first"))
        lines.append(f"| {name} | {rate:,.0f} | {cpu:.3f} | {first:.2f} |\n")
    return head + "".join(lines)


def main() -> None:
    """Runs all contestants in turn, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["jpeg", "png"], default="jpeg")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        data = make_data(arguments.kind, Path(root), arguments.samples)
        decode(next(Path(data.folder).glob("*/*")).read_bytes())
        results: dict[str, list[Result]] = {name: [] for name in CONTESTANTS}
        for _ in range(arguments.rounds):
            for name, contestant in CONTESTANTS.items():
                results[name].append(run(contestant, data))
    found = table(results)
    print(found)
    if arguments.write:
        page = arguments.write.read_text()
        marked = rf"(?<=<!-- table: {arguments.kind} -->\n).*?(?=<!-- end -->)"
        arguments.write.write_text(re.sub(marked, found, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
