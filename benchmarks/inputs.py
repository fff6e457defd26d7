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
from PIL import Image
from scipy.io import savemat

from tests.makers.imagenet import pack_devkit

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
            _add(outer, f"{wnid}.tar", _tar(files))
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(pack_devkit(_meta(list(inner)), b"1\n"))
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
    pictures = [_jpeg(number) for number in range(min(NUM_PICTURES, num_images))]
    for number in range(num_images):
        wnid = f"n{1_440_000 + 7 * (number // IMAGES_PER_CLASS):08d}"
        yield wnid, f"{wnid}_{number}.JPEG", _with_comment(pictures[number % len(pictures)], number)


def _jpeg(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(_photograph(number, HEIGHT, WIDTH)).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def _with_comment(jpeg: bytes, number: int) -> bytes:
    comment = b"%012d" % number
    return jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]


def _photograph(number: int, height: int, width: int) -> np.ndarray:
    """Uint8 [height, width, 3]: noise whose amplitude falls with the frequency,
    its colours alike.
    """
    random = np.random.default_rng([SEED, number])
    grey, *colours = (_falling_noise(random, height, width) for _ in range(4))
    pixels = np.stack([grey + 0.3 * colour for colour in colours], axis=-1)
    return np.clip(128 + CONTRAST * pixels, 0, 255).astype(np.uint8)


def _falling_noise(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1.0
    noise = np.fft.irfft2(
        np.fft.rfft2(random.standard_normal((height, width))) / frequency, s=(height, width)
    )
    return noise / noise.std()


def _tar(files: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as inner:
        for name, content in files:
            _add(inner, name, content)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _meta(wnids: list[str]) -> bytes:
    """`meta.mat`, the devkit's table of classes."""
    columns = [
        ("ILSVRC2012_ID", object),
        ("WNID", object),
        ("words", object),
        ("num_children", object),
    ]
    rows = [(number, wnid, f"class {number}", 0) for number, wnid in enumerate(wnids, start=1)]
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": np.array(rows, dtype=columns).reshape(-1, 1)}, do_compression=True)
    return buffer.getvalue()
