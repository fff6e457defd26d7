"""Every source reads from gs:// what it reads from disk, and gives the same bytes."""

import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest

from pipelines.build import build
from shardset.errors import ChangedInput, ManifestError
from shardset.format import manifest as manifests
from tests.faulty_proxy import Fault, FaultyProxy, is_media
from tests.makers.built import HERE, add, config_of
from tests.makers.cifar import cifar100, python_files
from tests.makers.documented import write_inputs
from tests.makers.folders import upload
from tests.makers.stored import contents_of

INPUTS = {
    "cifar10": "cifar-10-python.tar.gz",
    "cifar100": "cifar-100-python",
    "imagenet": "ilsvrc",
    "folder": "photos",
    "listing": "photos.csv",
    "webdataset": "set",
}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the input of each source."""
    folder = write_inputs(tmp_path_factory.mktemp("raw"))
    for name, data in python_files(cifar100(rows=3)).items():
        add(folder, f"cifar-100-python/{name}", data)
    build(config_of(folder / "photos", folder / "built"), HERE)
    for tar in (folder / "built").rglob("*.tar"):
        add(folder, f"set/{tar.parent.name}/{tar.name}", tar.read_bytes())
    shutil.rmtree(folder / "built")
    return folder


@pytest.mark.slow
@pytest.mark.gcs
@pytest.mark.parametrize("source", INPUTS)
def test_a_source_on_gs_gives_what_it_gives_on_disk(source, raw, tmp_path, gcs_root):
    upload(raw, f"{gcs_root}/raw")
    for where, output in ((raw, tmp_path / "out"), (f"{gcs_root}/raw", f"{gcs_root}/out")):
        given = f"{where}/{INPUTS[source]}"
        assert build(config_of(given, output, source=source), HERE).published
    assert contents_of(f"{gcs_root}/out") == contents_of(tmp_path / "out")


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


@pytest.fixture
def flipping(raw, gcs_root, gcs_emulator, monkeypatch):
    """The address of the input behind a proxy that flips a bit of each range once."""
    upload(raw, f"{gcs_root}/raw")
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.script = flips_each_range_once("/raw/")
        yield f"{gcs_root}/raw"


@pytest.mark.slow
@pytest.mark.gcs
def test_a_bit_of_an_image_that_was_flipped_at_the_first_look_at_an_inner_tar_is_an_error(
    gcs_root, flipping
):
    config = config_of(f"{flipping}/{INPUTS['imagenet']}", f"{gcs_root}/out", source="imagenet")
    with pytest.raises(ChangedInput, match=r"img_train\.tar.*its bytes changed.*read twice"):
        build(config, HERE)
    with pytest.raises(ManifestError, match="no manifest"):
        manifests.load(f"{gcs_root}/out")
