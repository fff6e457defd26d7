"""The other readers, in their own environment (.tools/bench-venv): each as its documentation shows
it, and tuned.

"As documented" decodes with Pillow and crops with torchvision, as all of their documentations do.
"Tuned" decodes with the fastest libraries (simplejpeg at reduced size where the crop allows it,
kornia_rs, OpenCV's linear resize), collates uint8 arrays and mirrors nothing on the host, as the
stream does; batches are made in the worker processes wherever the reader can.

Each function imports what it needs: workers that are spawned import this module again, and should
bring no torch where nothing asks for it.
"""

import importlib
import io
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import kornia_rs  # its module "io" would be pickled as Python's
import numpy as np
import simplejpeg
from PIL import Image

from benchmarks.reading import BATCH, WORKERS, Contestant, Data, main
from shardset.decode.crops import NUM_TRIES, RandomResizedCrop, random_box


def convert(data: Data) -> None:
    """Writes the images in the forms of MosaicML Streaming and LitData, unless they are there."""
    import litdata
    from streaming import MDSWriter

    root = Path(data.folder)
    files = sorted(map(str, (root / "files").glob("*/*")))
    if not (root / "mds").exists():
        with MDSWriter(out=str(root / "mds"), columns={"image": "bytes", "label": "int"}) as out:
            for path in files:
                out.write(_sample(path))
    if not (root / "litdata").exists():
        litdata.optimize(
            _sample, files, str(root / "litdata"), num_workers=WORKERS, chunk_bytes="64MB"
        )


def _sample(path: str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes(), "label": int(Path(path).parent.name)}


def webdataset_reader(make: Callable[[Data], Callable]) -> Contestant:
    """Its documentation's chain: shuffled shards, a shuffle buffer of 1,000, batches in the
    workers, a WebLoader.
    """

    def read(data: Data) -> Iterator[int]:
        import webdataset

        shards = sorted(map(str, Path(data.folder, "shards", "train").glob("*.tar")))
        dataset = (
            webdataset.WebDataset(shards, shardshuffle=len(shards))
            .shuffle(1000)
            .to_tuple(data.field, "cls")
            .map_tuple(make(data), int)
            .batched(BATCH)
        )
        loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS)
        return (len(labels) for _, labels in loader)

    return read


def webdataset_bytes(data: Data) -> Iterator[int]:
    """In one process, neither shuffled nor decoded."""
    import webdataset

    shards = sorted(map(str, Path(data.folder, "shards", "train").glob("*.tar")))
    dataset = webdataset.WebDataset(shards, shardshuffle=False)
    return (1 for _ in range(data.passes) for _ in dataset)


def streaming_reader(make: Callable[[Data], Callable]) -> Contestant:
    """MosaicML's StreamingDataset and StreamingDataLoader."""

    def read(data: Data) -> Iterator[int]:
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        decoded = make(data)

        class Images(StreamingDataset):
            def __getitem__(self, at: int) -> Any:
                found = super().__getitem__(at)
                return decoded(found["image"]), found["label"]

        dataset = Images(local=str(Path(data.folder, "mds")), shuffle=True, batch_size=BATCH)
        loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)
        return (len(labels) for _, labels in loader)

    return read


def litdata_reader(make: Callable[[Data], Callable]) -> Contestant:
    """LitData's StreamingDataset and StreamingDataLoader."""

    def read(data: Data) -> Iterator[int]:
        import litdata

        decoded = make(data)

        class Images(litdata.StreamingDataset):
            def __getitem__(self, at: Any) -> Any:
                found = super().__getitem__(at)
                return decoded(bytes(found["image"])), found["label"]

        dataset = Images(str(Path(data.folder, "litdata")), shuffle=True, drop_last=False)
        loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)
        return (len(labels) for _, labels in loader)

    return read


def grain_reader(make: Callable[[Data], Callable]) -> Contestant:
    """Grain's MapDataset over the files: shuffled, mapped, batched, read by two processes."""

    def read(data: Data) -> Iterator[int]:
        import grain

        decoded = make(data)
        files = sorted(map(str, Path(data.folder, "files").glob("*/*")))

        def load(path: str) -> tuple[Any, int]:
            found = _sample(path)
            return np.asarray(decoded(found["image"])), found["label"]

        dataset = grain.MapDataset.source(files).shuffle(seed=1).map(load).batch(BATCH)
        found = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0))
        return (
            len(labels)
            for _, labels in found.mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS))
        )

    return read


def image_folder(make: Callable[[Data], Callable]) -> Contestant:
    """torchvision's ImageFolder and PyTorch's DataLoader."""

    def read(data: Data) -> Iterator[int]:
        from torch.utils.data import DataLoader
        from torchvision.datasets import ImageFolder

        decoded = make(data)

        def load(path: str) -> Any:
            return decoded(Path(path).read_bytes())

        files = ImageFolder(str(Path(data.folder, "files")), loader=load)
        loader = DataLoader(files, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=_collated)
        return (len(labels) for _, labels in loader)

    return read


def documented(data: Data) -> Callable[[bytes], Any]:
    """Pillow and torchvision, to float tensors."""
    from torchvision import transforms

    if data.kind == "jpeg":
        crop: Any = transforms.RandomResizedCrop(data.size)
    else:
        crop = transforms.RandomCrop(data.size, padding=4)
    transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    return lambda content: transform(Image.open(io.BytesIO(content)).convert("RGB"))


def tuned(data: Data) -> Callable[[bytes], Any]:
    """simplejpeg or kornia_rs and OpenCV, to uint8 arrays, with random numbers of the process."""
    draw, draw_crop = random.Random(1), RandomResizedCrop()

    def photograph(content: bytes) -> np.ndarray:
        height, width, *_ = simplejpeg.decode_jpeg_header(content)
        box = random_box(
            draw_crop, height, width, np.array([draw.random() for _ in range(3 + 2 * NUM_TRIES)])
        )
        ratio = max(data.size / box.height, data.size / box.width)
        least = math.ceil(height * ratio), math.ceil(width * ratio)
        image = simplejpeg.decode_jpeg(
            content, "RGB", min_height=least[0], min_width=least[1], min_factor=2
        )
        down, right = image.shape[0] / height, image.shape[1] / width
        rows = slice(round(box.top * down), round((box.top + box.height) * down))
        columns = slice(round(box.left * right), round((box.left + box.width) * right))
        return cv2.resize(
            image[rows, columns], (data.size, data.size), interpolation=cv2.INTER_LINEAR
        )

    def thumbnail(content: bytes) -> np.ndarray:
        padded = np.zeros((data.size + 8, data.size + 8, 3), np.uint8)
        padded[4:-4, 4:-4] = kornia_rs.io.decode_image_png_u8(
            content, (data.size, data.size), "rgb"
        )
        top, left = draw.randrange(9), draw.randrange(9)
        return padded[top : top + data.size, left : left + data.size].copy()

    def decoded(content: bytes) -> np.ndarray:
        cv2.setNumThreads(1)
        return photograph(content) if data.kind == "jpeg" else thumbnail(content)

    return decoded


def _collated(samples: list[Any]) -> Any:
    import torch
    from torch.utils.data import default_collate

    if isinstance(samples[0][0], np.ndarray):
        return torch.from_numpy(np.stack([image for image, _ in samples])), torch.tensor(
            [label for _, label in samples]
        )
    return default_collate(samples)


READERS: dict[str, tuple[str, Callable[[Callable[[Data], Callable]], Contestant]]] = {
    "webdataset": ("webdataset", webdataset_reader),
    "MosaicML Streaming": ("streaming", streaming_reader),
    "LitData": ("litdata", litdata_reader),
    "Grain on files": ("grain", grain_reader),
    "ImageFolder": ("torchvision.datasets", image_folder),
}
"""The library of each reader, imported before it is measured, and what makes it."""

DECODERS = {"as documented": documented, "tuned": tuned}


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    name = sys.argv[1]
    if name == "convert":
        convert(Data(**json.loads(sys.argv[2])))
    else:
        reader, _, how = name.partition(", ")
        library, make = READERS[reader]
        importlib.import_module(library)
        if name != "Grain on files, tuned":  # which needs no torch
            importlib.import_module("torchvision.transforms")
        contestant = make(DECODERS[how]) if how in DECODERS else webdataset_bytes
        main({name: contestant}, sys.argv[1:])
