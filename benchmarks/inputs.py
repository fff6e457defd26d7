"""Seeded raw inputs: the same arguments make the same files.

Photographs are noise with the spectrum of natural images (amplitude falls with frequency), which a
JPEG encoder turns into about 110 KB at 500x375 and which takes as long to decode as a photograph of
that size. A few dozen are drawn; each file gets its number in a comment, so that no two files are
equal.
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.makers import imagenet
from tests.makers.shardset import encode
from tests.makers.tars import plain, tar_bytes

SEED = 20_261_121
NUM_PICTURES = 48
IMAGES_PER_CLASS = 200
HEIGHT, WIDTH = 375, 500
QUALITY = 88
CONTRAST = 54.0


def class_folders(folder: Path, num_images: int) -> int:
    """`train/nNNNNNNNN/nNNNNNNNN_NUMBER.JPEG`."""
    for wnid, name, content in _images(num_images):
        path = folder / "train" / wnid / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return num_images


def tar_of_tars(folder: Path, num_images: int) -> int:
    """`ILSVRC2012_img_train.tar`, a tar of one tar a class, and its devkit."""
    inner: dict[str, list[tuple[str, bytes]]] = {}
    for wnid, name, content in _images(num_images):
        inner.setdefault(wnid, []).append((name, content))
    with tarfile.open(folder / "ILSVRC2012_img_train.tar", "w", format=tarfile.GNU_FORMAT) as outer:
        for wnid, files in inner.items():
            content = tar_bytes(files, tarfile.GNU_FORMAT)
            outer.addfile(plain(f"{wnid}.tar", content), io.BytesIO(content))
    synsets = [(number, wnid, f"class {number}", 0) for number, wnid in enumerate(inner, start=1)]
    devkit = imagenet.pack_devkit(imagenet.meta(synsets=synsets), b"1\n")
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(devkit)
    return num_images


MAKERS = {"folders": class_folders, "imagenet": tar_of_tars}
FULL_SIZE = 10_000


def make(kind: str, folder: Path, num_images: int) -> int:
    """The input of that kind in `folder`, made unless an earlier call did; returns how many images
    it holds.
    """
    done = folder / ".done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        done.write_text(str(MAKERS[kind](folder, num_images)))
    return int(done.read_text())


def _images(num_images: int) -> Iterator[tuple[str, str, bytes]]:
    """Class, file name and content of each image, class by class."""
    pictures = [
        encode(_photograph(number), "JPEG", quality=QUALITY)
        for number in range(min(NUM_PICTURES, num_images))
    ]
    for number in range(num_images):
        wnid = f"n{1_440_000 + 7 * (number // IMAGES_PER_CLASS):08d}"
        yield wnid, f"{wnid}_{number}.JPEG", _with_comment(pictures[number % len(pictures)], number)


def _with_comment(jpeg: bytes, number: int) -> bytes:
    comment = b"%012d" % number
    return jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]


def _photograph(number: int) -> np.ndarray:
    """Uint8 [height, width, 3]: noise whose amplitude falls with the frequency,
    its colours alike.
    """
    random = np.random.default_rng([SEED, number])
    grey, *colours = (_falling_noise(random) for _ in range(4))
    pixels = np.stack([grey + 0.3 * colour for colour in colours], axis=-1)
    return np.clip(128 + CONTRAST * pixels, 0, 255).astype(np.uint8)


def _falling_noise(random: np.random.Generator) -> np.ndarray:
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH))
    frequency[0, 0] = 1.0
    spectrum = np.fft.rfft2(random.standard_normal((HEIGHT, WIDTH)))
    noise = np.fft.irfft2(spectrum / frequency, s=(HEIGHT, WIDTH))
    return noise / noise.std()
