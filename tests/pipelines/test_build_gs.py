"""Every source reads from gs:// what it reads from disk, and gives the same bytes."""

from pathlib import Path

import pytest

from pipelines.build import build
from pipelines.config import BuildConfig
from shardset.storage.open import open_storage
from tests.makers import imagenet
from tests.makers.cifar import cifar10, cifar100, python_files, write_archive
from tests.makers.folders import write_class_folders, write_csv
from tests.makers.stored import files_of

HERE = ["--direct_running_mode=in_memory"]


def upload(folder: Path, url: str) -> None:
    storage = open_storage(url)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with storage.writer(str(path.relative_to(folder))) as out:
            out.write(path.read_bytes())


def write_cifar10(folder: Path) -> str:
    write_archive(folder / "cifar-10-python.tar.gz", python_files(cifar10(rows=3)), folder="cifar-10-batches-py")
    return "cifar-10-python.tar.gz"


def write_cifar100(folder: Path) -> str:
    for name, data in python_files(cifar100(rows=3)).items():
        (folder / "cifar-100-python").mkdir(exist_ok=True)
        (folder / "cifar-100-python" / name).write_bytes(data)
    return "cifar-100-python"


def write_imagenet(folder: Path) -> str:
    imagenet.put(folder / "ilsvrc", imagenet.archives(imagenet.images()))
    return "ilsvrc"


def write_folder(folder: Path) -> str:
    write_class_folders(folder / "photos", ["cat", "dog"], 8)
    return "photos"


def write_listing(folder: Path) -> str:
    write_folder(folder)
    rows = [[f"photos/{name}/{number:03d}.png", name] for name in ("cat", "dog") for number in range(8)]
    write_csv(folder / "photos.csv", ["path", "label"], rows)
    return "photos.csv"


def write_tars(folder: Path) -> str:
    raw = folder / write_folder(folder)
    build(BuildConfig(source="folder", input=str(raw), output=str(folder / "set"), num_shards={"": 2}), HERE)
    return "set"


SOURCES = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "imagenet": write_imagenet,
    "folder": write_folder,
    "listing": write_listing,
    "webdataset": write_tars,
}


@pytest.mark.gcs
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_on_gs_gives_what_it_gives_on_disk(source, tmp_path, gcs_root):
    (tmp_path / "raw").mkdir()
    name = SOURCES[source](tmp_path / "raw")
    upload(tmp_path / "raw", f"{gcs_root}/raw")
    for where in (str(tmp_path), gcs_root):
        config = BuildConfig(source=source, input=f"{where}/raw/{name}", output=f"{where}/out", num_shards={"": 2})
        assert build(config, HERE).published
    assert files_of(f"{gcs_root}/out") == files_of(tmp_path / "out")
