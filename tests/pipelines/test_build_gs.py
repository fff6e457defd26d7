"""Every source reads from gs:// what it reads from disk, and gives the same bytes."""

from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from pipelines.build import build
from pipelines.config import BuildConfig
from shardset.storage.open import open_storage
from tests.faulty_proxy import Fault, FaultyProxy, in_turn, is_media, is_upload
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
    write_archive(
        folder / "cifar-10-python.tar.gz",
        python_files(cifar10(rows=3)),
        folder="cifar-10-batches-py",
    )
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
    rows = [
        [f"photos/{name}/{number:03d}.png", name] for name in ("cat", "dog") for number in range(8)
    ]
    write_csv(folder / "photos.csv", ["path", "label"], rows)
    return "photos.csv"


def write_tars(folder: Path) -> str:
    raw = folder / write_folder(folder)
    build(
        BuildConfig(
            source="folder", input=str(raw), output=str(folder / "set"), num_shards={"": 2}
        ),
        HERE,
    )
    return "set"


SOURCES = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "imagenet": write_imagenet,
    "folder": write_folder,
    "listing": write_listing,
    "webdataset": write_tars,
}


@pytest.mark.slow
@pytest.mark.gcs
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_on_gs_gives_what_it_gives_on_disk(source, tmp_path, gcs_root):
    (tmp_path / "raw").mkdir()
    name = SOURCES[source](tmp_path / "raw")
    upload(tmp_path / "raw", f"{gcs_root}/raw")
    for where in (str(tmp_path), gcs_root):
        config = BuildConfig(
            source=source, input=f"{where}/raw/{name}", output=f"{where}/out", num_shards={"": 2}
        )
        assert build(config, HERE).published
    assert files_of(f"{gcs_root}/out") == files_of(tmp_path / "out")


def flips_each_range_once(folder):
    """A script that flips a bit of the first answer to each request for bytes of objects in a
    folder.
    """
    asked = set()

    def script(seen):
        call = seen.path, seen.headers.get("range", "bytes=0-99")
        if not is_media(seen) or folder not in unquote(seen.path) or call in asked:
            return None
        asked.add(call)
        start, last = map(int, call[1].removeprefix("bytes=").split("-"))
        return Fault("flip", at=(last - start) // 2)

    return script


@pytest.mark.slow
@pytest.mark.gcs
@pytest.mark.parametrize("source", ["imagenet", "listing", "webdataset"])
def test_a_bit_that_is_flipped_once_in_each_range_of_the_input_changes_nothing(
    source, tmp_path, gcs_root, gcs_emulator, monkeypatch
):
    (tmp_path / "raw").mkdir()
    name = SOURCES[source](tmp_path / "raw")
    upload(tmp_path / "raw", f"{gcs_root}/raw")
    config = BuildConfig(
        source=source, input=f"{gcs_root}/raw/{name}", output=f"{gcs_root}/out", num_shards={"": 2}
    )
    build(replace(config, input=f"{tmp_path}/raw/{name}", output=str(tmp_path / "out")), HERE)
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.script = flips_each_range_once("/raw/")
        build(config, HERE)
    assert files_of(f"{gcs_root}/out") == files_of(tmp_path / "out")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The config and the result of a build on a disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    raw = str(folder / write_folder(folder))
    config = BuildConfig(source="folder", input=raw, output=str(folder / "out"), num_shards={"": 1})
    return config, build(config, HERE).published


@pytest.mark.gcs
@pytest.mark.parametrize("field", ["", '"plan_digest": "'])
def test_a_bit_flipped_once_in_the_manifest_that_a_build_reads_at_its_end_changes_nothing(
    field, undisturbed, gcs_root, gcs_emulator, monkeypatch
):
    config, published = undisturbed
    at = (Path(config.output) / "manifest.json").read_text().index(field) + len(field)
    flips = in_turn(
        Fault("flip", at=at), when=lambda seen: is_media(seen) and "manifest.json" in seen.path
    )
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.script = lambda seen: flips(seen) if any(map(is_commit, proxy.seen)) else None
        found = build(replace(config, output=f"{gcs_root}/out"), HERE)
    assert found.published == published


def is_commit(seen):
    return is_upload(seen) and b'/out/manifest.json"' in seen.start
