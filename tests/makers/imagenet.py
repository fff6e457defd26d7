"""A tiny ILSVRC2012 in its three published layouts, always the same."""

import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.makers.odd_images import jpeg
from tests.makers.tars import tar_bytes

SYNSETS = [
    # (ILSVRC2012_ID, wnid, words, number of children); the ids are in another order than the wnids.
    (1, "n02119789", "kit fox, Vulpes macrotis", 0),
    (2, "n01440764", "tench, Tinca tinca", 0),
    (3, "n04008634", "projectile, missile", 0),
    (4, "n01443537", "goldfish, Carassius auratus", 0),
    (5, "n00001740", "entity", 2),
]
NAMES = {wnid: words.split(",")[0] for _, wnid, words, num_children in SYNSETS if not num_children}
WNIDS = sorted(NAMES)
TRUTH = ["n04008634", "n01440764", "n02119789", "n02119789", "n01443537", "n01440764", "n04008634"]
"""The class of validation image 1, 2, ..."""


@dataclass(frozen=True, slots=True)
class Image:
    """What a source must find: the key, the class, the bytes."""

    split: str
    key: str
    wnid: str
    content: bytes


def images(wnids: list[str] = WNIDS, num_train: int = 3) -> list[Image]:
    """`num_train` training images of each class, and the validation images of `TRUTH`."""
    train = [
        Image("train", f"{wnid}_{7 + 10 * number}", wnid, jpeg(100 * WNIDS.index(wnid) + number))
        for wnid in wnids
        for number in range(num_train)
    ]
    validation = [
        Image("validation", f"ILSVRC2012_val_{number:08d}", wnid, jpeg(1000 + number))
        for number, wnid in enumerate(TRUTH, start=1)
    ]
    return train + validation


def archives(found: list[Image]) -> dict[str, bytes]:
    """The two archives of images and the devkit."""
    inner = {f"{wnid}.tar": tar_bytes(_files(found, "train", wnid)) for wnid in _wnids(found)}
    return {
        "ILSVRC2012_img_train.tar": tar_bytes(inner),
        "ILSVRC2012_img_val.tar": tar_bytes(_files(found, "validation")),
        "ILSVRC2012_devkit_t12.tar.gz": devkit(),
    }


def devkit(truth: list[str] = TRUTH, do_compression: bool = True) -> bytes:
    """The devkit with its table of synsets and the validation labels as ILSVRC2012_IDs."""
    ids = {wnid: number for number, wnid, _, _ in SYNSETS}
    return pack_devkit(meta(do_compression), "".join(f"{ids[wnid]}\n" for wnid in truth).encode())


def pack_devkit(meta_mat: bytes, truth: bytes) -> bytes:
    """A `.tar.gz` of the two files that matter, and one that does not."""
    folder = "ILSVRC2012_devkit_t12"
    files = {
        f"{folder}/readme.txt": b"Development kit",
        f"{folder}/data/meta.mat": meta_mat,
        f"{folder}/data/ILSVRC2012_validation_ground_truth.txt": truth,
    }
    return gzip.compress(tar_bytes(files), mtime=0)


def meta(do_compression: bool = True, synsets: Sequence[tuple[object, ...]] = SYNSETS) -> bytes:
    """`meta.mat`: a MATLAB structure array `synsets` with the columns of the published one that
    matter.
    """
    columns = [
        ("ILSVRC2012_ID", object),
        ("WNID", object),
        ("words", object),
        ("num_children", object),
    ]
    table = np.array(synsets, dtype=columns).reshape(-1, 1)
    buffer = io.BytesIO()
    from scipy.io import savemat  # .venv-core lacks it

    savemat(buffer, {"synsets": table}, do_compression=do_compression)
    return buffer.getvalue()


def kaggle(found: list[Image]) -> dict[str, bytes]:
    """Kaggle's CLS-LOC tree with its two tables."""
    root = "ILSVRC/Data/CLS-LOC"
    rows = [
        f"{image.key},{image.wnid} 85 1 499 272 {image.wnid} 1 1 9 9 \n"
        for image in _of(found, "validation")
    ]
    words = {wnid: words for _, wnid, words, num_children in SYNSETS if not num_children}
    return {
        "LOC_val_solution.csv": ("ImageId,PredictionString\n" + "".join(reversed(rows))).encode(),
        "LOC_synset_mapping.txt": "".join(f"{wnid} {words[wnid]}\n" for wnid in WNIDS).encode(),
        **{
            f"{root}/train/{image.wnid}/{image.key}.JPEG": image.content
            for image in _of(found, "train")
        },
        **{f"{root}/val/{image.key}.JPEG": image.content for image in _of(found, "validation")},
        f"{root}/test/ILSVRC2012_test_00000001.JPEG": b"no label",
    }


def class_folders(found: list[Image], validation: str = "val") -> dict[str, bytes]:
    """Folders of classes for both splits, nothing else."""
    folders = {"train": "train", "validation": validation}
    return {
        f"{folders[image.split]}/{image.wnid}/{image.key}.JPEG": image.content for image in found
    }


def put(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Writes the files below `folder`, and returns it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def _of(found: list[Image], split: str) -> list[Image]:
    return [image for image in found if image.split == split]


def _wnids(found: list[Image]) -> list[str]:
    return list(dict.fromkeys(image.wnid for image in _of(found, "train")))


def _files(found: list[Image], split: str, wnid: str | None = None) -> dict[str, bytes]:
    return {
        f"{image.key}.JPEG": image.content
        for image in _of(found, split)
        if wnid in (None, image.wnid)
    }
