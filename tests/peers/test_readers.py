"""The tars load in other libraries with the exported files, sample for sample, by the lines of
docs/how-to/other-readers.md.
"""

import hashlib
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines.check.verify import verify
from pipelines.export.side_files import export
from scripts import venvs
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest
from shardset.format.tar import StoredSample
from tests.makers.documented import page, python_of, run
from tests.makers.shardset import encode, jpeg_samples, new_set, pixels, png_samples
from tests.makers.stored import samples_of

pytestmark = pytest.mark.nightly

PAGE = page("docs/how-to/other-readers.md")
READERS = ["webdataset", "wids", "timm_list", "timm", "energon", "dali", "hf"]
BLOCKS = dict(zip(READERS, python_of(PAGE), strict=True))
GIVES = {
    "webdataset": {"key", "label", "image"},
    "wids": {"key", "label", "image"},
    "timm": {"key", "label", "pixels"},
    "energon": {"key", "label", "pixels", "image"},
    "dali": {"label", "image", "pixels"},
    "hf": {"key", "label", "image", "class"},
}


@dataclass(frozen=True)
class Exported:
    """A set with all side files, in the folder `shards` of a workplace; split -> key -> what a
    reader must give.
    """

    place: Path
    manifest: Manifest
    expected: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def interpreter() -> str:
    assert venvs.is_current(venvs.PEERS, venvs.REQUIREMENTS), "run `make peers` first"
    return str(venvs.python_of(venvs.PEERS))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, interpreter: str) -> Exported:
    place = tmp_path_factory.mktemp("peers")
    train = png_samples("train", 22, size=12)
    # A key with a folder, one like the beginning of another, and the copy of a sample.
    odd = [("cat/a_1", 0), ("cat/a_1b", 1), ("cat/a_1@1", 0)]
    train += [
        StoredSample(
            key=key,
            fields=(("png", encode(pixels(90 + n, 12, 12), "png")), ("cls", b"3")),
            label=3,
            serial=22,
            copy=copy,
        )
        for n, (key, copy) in enumerate(odd)
    ]
    samples = {"train": train, "test": jpeg_samples("test", 8, height=16, width=12)}
    new_set(samples, place / "shards", num_shards=3)
    export(str(place / "shards"), ["wids", "hf"])
    subprocess.run([sys.executable, "-c", BLOCKS["timm_list"]], cwd=place, check=True)
    (prepare,) = re.findall(r"```console\n(energon .*?)```", PAGE, re.DOTALL)
    subprocess.run(["bash", "-c", f"{venvs.PEERS}/bin/{prepare}"], cwd=place, check=True)
    manifest = manifests.load(str(place / "shards")).manifest
    return Exported(
        place, manifest, {name: expected(place / "shards", manifest, name) for name in samples}
    )


def expected(folder: Path, manifest: Manifest, split: str) -> list[dict[str, Any]]:
    """In stored order, from the tars alone."""
    found = []
    for key, fields in samples_of(folder, manifest, split).items():
        image = fields.get("png") or fields["jpg"]
        label = int(fields["cls"])
        decoded = np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).tobytes()
        hashes = {
            "image": hashlib.sha256(image).hexdigest(),
            "pixels": hashlib.sha256(decoded).hexdigest(),
        }
        found.append({"key": key, "label": label, "class": f"class {label}", **hashes})
    return found


def collected(interpreter: str, place: Path, reader: str, code: str) -> list[dict[str, Any]]:
    words = [interpreter, str(Path(__file__).parent / "collect.py"), reader]
    done = subprocess.run(
        words,
        input=code,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(place),
            "HF_HOME": str(place / "hf"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (place / "collected.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("reader", GIVES)
def test_every_reader_gives_every_sample_of_a_split_of_pngs_or_jpegs(
    exported, interpreter, reader, split
):
    code = BLOCKS[reader]
    if split == "test":
        code = code.replace("train", "test").replace('"png"', '"jpg"')
    found = collected(interpreter, exported.place, reader, code)
    assert len(found) == exported.manifest.split(split).num_samples
    assert found == [
        {name: row[name] for name in GIVES[reader]} for row in exported.expected[split]
    ]


@pytest.mark.parametrize("reader", ["wids", "hf"])
def test_files_in_another_folder_lead_to_the_tars(exported, interpreter, reader):
    export(
        str(exported.place / "shards"), [reader], output=str(exported.place / "elsewhere" / reader)
    )
    code = BLOCKS[reader].replace('"shards', f'"elsewhere/{reader}')
    assert "elsewhere" in code
    found = collected(interpreter, exported.place, reader, code)
    assert found == [
        {name: row[name] for name in GIVES[reader]} for row in exported.expected["train"]
    ]


def test_the_set_is_still_whole_after_all_of_them(exported):
    assert verify(str(exported.place / "shards"), deep=True).ok


OF_TWO_EPOCHS = """
pipe = decoded()
for epoch in (0, 1):
    for expected in stream.epoch(epoch):
        images, labels = pipe.run()
        assert labels.as_array().ravel().tolist() == expected["label"].tolist()
        assert [np.asarray(image).shape for image in images] == [(40, 50, 3)] * 32
    try:
        pipe.run()
    except StopIteration:
        pipe.reset()
print("two epochs")
"""


def test_dali_takes_the_batches_of_a_stream_by_the_lines_of_the_page(interpreter, tmp_path):
    new_set(jpeg_samples("train", 64, height=40, width=50), tmp_path / "shards")
    (code,) = python_of(page("docs/how-to/frameworks.md").partition("## NVIDIA DALI")[2])
    code = code.replace('device="mixed"', 'device="cpu"').replace("device_id=0", "device_id=None")
    said = run([interpreter, "-c", "import shardset\n" + code + OF_TWO_EPOCHS], tmp_path)
    assert said.endswith("two epochs\n")
