"""Every command and line of code on the pages for beginners and for those who come from elsewhere,
run as it stands.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import shardset
from pipelines.cli import main as pipelines
from scripts import venvs
from shardset.errors import ShardsetError, missing_library
from shardset.format import manifest as manifests
from tests.makers.documented import page, python_of, run, run_all, steps_of, write_inputs
from tests.makers.folders import write_class_folders, write_images
from tests.makers.shardset import encode, new_set, pixels, png_samples
from tests.makers.stored import samples_of
from trainer.cli import main as trainer
from trainer.errors import TrainingError, memory_errors

SHORTER = {
    "--manifest shards --run-dir run": (
        "--manifest shards --run-dir run --strategy single --max-steps 10"
    )
}
WRITE_MDS = """
from pathlib import Path
from streaming import MDSWriter
with MDSWriter(out="mds/train", columns={"image": "bytes", "label": "int"}) as writer:
    for path in sorted(Path("photos").glob("*/*.png")):
        writer.write({"image": path.read_bytes(), "label": int(path.parent.name == "dog")})
"""
MADE_UP_TFDS = """
import tensorflow_datasets
made_up = tensorflow_datasets.testing.mock_data(num_examples=40)
made_up.__enter__()
"""
WRITE_LITDATA = """
import io
from pathlib import Path
from litdata import optimize
def sample(path):
    return {"image": path.read_bytes(), "label": int(path.parent.name == "dog")}
if __name__ == "__main__":
    files = sorted(Path("photos").glob("*/*.png"))
    optimize(sample, files, output_dir="litdata", num_workers=1, chunk_bytes="64MB")
"""
ANY_LOOP = "Any loop"
SECTIONS = ["webdataset", "MosaicML Streaming", "ImageFolder", "TFDS"]
OF_PEERS = ("MosaicML Streaming", "TFDS")
BOXES = {
    "YOLO": (2, [3.6, 3.2, 0.8, 1.6]),
    "Pascal VOC": (1, [1, 2, 4, 6]),
    "Hugging Face objects": (1, [1, 2, 4, 6]),
    "COCO": (2, [0.5, 0.5, 0.1, 0.2]),
}
"""Of each form, the category of a box and its COCO `bbox`."""
FORMS = ["Flat folders", "Arrays", "YOLO", "Pascal VOC", "Hugging Face objects", "COCO"]
SLOW_LOOPS = {"torch": pytest.mark.slow, "litdata": pytest.mark.nightly}
LOOPS = ["loop", "datasets", *(pytest.param(name, marks=mark) for name, mark in SLOW_LOOPS.items())]


def section_of(title: str) -> str:
    """One section of the page about migrating."""
    return page("docs/how-to/migrate.md").split(f"\n## {title}\n")[1].split("\n## ")[0]


def run_steps(text: str, place: Path, replaced: Mapping[str, str] | None = None) -> list[str]:
    """What each command and each block of Python of a text prints, run in their order."""
    printed = []
    for kind, step in steps_of(text):
        if kind == "console":
            printed += run_all(map(str.strip, step.splitlines()), place, replaced or {})
        else:
            printed.append(run(python_for(step), place))
    return printed


def python_for(code: str) -> list[str]:
    """The words that run these lines, in the environment of the library that they come from."""
    if "from streaming import" in code or "from litdata import" in code:
        return [peers_python(), "-c", code]
    if "tensorflow_datasets" in code:
        return [peers_python(), "-c", MADE_UP_TFDS + code]
    return [sys.executable, "-c", code]


def peers_python() -> str:
    """The environment of the libraries that people come from."""
    return str(venvs.install(venvs.PEERS, venvs.REQUIREMENTS, on_top=True))


@pytest.mark.nightly
def test_every_command_of_the_first_hour_works_in_its_order(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    printed = "".join(run_steps(page("docs/tutorials/quickstart.md"), tmp_path, SHORTER))
    assert "photos/cat/000.png: " in printed
    assert "steps an epoch" in printed


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=pytest.mark.nightly if title in OF_PEERS else pytest.mark.slow)
        for title in SECTIONS
    ],
)
def test_each_way_of_migrating_works_in_its_order(title: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_class_folders(tmp_path / "pictures", ["cat", "dog"], 12, splits=("train", "val"))
    if title == "webdataset":
        build = "shardset build --source folder --input photos --output other --num-shards 2"
        run_all([build], tmp_path, {})
        shutil.copytree(
            tmp_path / "other/train", tmp_path / "tars", ignore=shutil.ignore_patterns("*.npy")
        )
    if title == "MosaicML Streaming":
        run([peers_python(), "-c", WRITE_MDS], tmp_path)
    run_steps(section_of(title), tmp_path)
    [made] = tmp_path.glob("shards-from-*")
    list(stream(str(made)))


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_gives_the_writer_all_its_samples(name: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_class_folders(tmp_path / "pictures", ["cat", "dog"], 12, splits=("train",))
    if name == "litdata":
        (tmp_path / "make.py").write_text(WRITE_LITDATA)
        run([peers_python(), "make.py"], tmp_path)
    rows = [
        {
            "image": {"bytes": path.read_bytes(), "path": path.name},
            "label": int(path.parent.name == "dog"),
        }
        for path in sorted((tmp_path / "pictures").rglob("*.png"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "photos.parquet")
    [code] = [text for text in python_of(section_of(ANY_LOOP)) if f"shards-from-{name}" in text]
    run(python_for(code), tmp_path)
    manifest = manifests.load(str(tmp_path / f"shards-from-{name}")).manifest
    split = manifest.split("train")
    assert (
        sum(split.class_totals) == split.num_samples == {"loop": 100, "litdata": 80}.get(name, 24)
    )


def write_forms(place: Path) -> None:
    """The inputs of FORMS: 12 images each; the first ones have boxes."""
    numbers = range(12)
    write_images(
        place, [f"flat/{name}_{number:03}.png" for name in ("cat", "dog") for number in range(6)]
    )
    np.savez(
        place / "digits.npz",
        images=np.stack([pixels(n, 8, 8) for n in numbers]),
        labels=np.arange(12) % 3,
    )
    write_images(place, [f"yolo/images/{('train', 'val')[n % 2]}/{n}.png" for n in numbers])
    (place / "yolo/labels/train").mkdir(parents=True)
    (place / "yolo/labels/train/0.txt").write_text("2 0.5 0.5 0.1 0.2\n1 0.1 0.2 0.3 0.4\n")
    write_images(place, [f"voc/JPEGImages/{n:02}.jpg" for n in numbers])
    (place / "voc/Annotations").mkdir()
    for n in numbers:
        ends = "<xmin>2</xmin><ymin>3</ymin><xmax>5</xmax><ymax>8</ymax>"
        found = f"<object><name>dog</name><bndbox>{ends}</bndbox></object>" * (n == 0)
        (place / f"voc/Annotations/{n:02}.xml").write_text(f"<annotation>{found}</annotation>")
    rows = [
        {
            "image": {"bytes": encode(pixels(n, 8, 8), "png")},
            "objects": {"bbox": [[1.0, 2, 4, 6]] * (n == 0), "category": [1] * (n == 0)},
        }
        for n in numbers
    ]
    pq.write_table(pa.Table.from_pylist(rows), place / "objects.parquet")
    write_images(place, [f"coco/val2017/{n}.png" for n in numbers])
    (place / "coco/annotations").mkdir()
    coco = {
        "images": [{"id": n, "file_name": f"{n}.png"} for n in numbers],
        "annotations": [{"image_id": 0, "category_id": 2, "bbox": [0.5, 0.5, 0.1, 0.2]}],
        "categories": [{"id": 2, "name": "cat"}],
    }
    (place / "coco/annotations/instances_val2017.json").write_text(json.dumps(coco))


@pytest.mark.slow
@pytest.mark.parametrize("title", FORMS)
def test_the_recipe_for_each_other_form_of_input_gives_all_its_samples(
    title: str, tmp_path: Path
) -> None:
    write_forms(tmp_path)
    run_steps(section_of(title), tmp_path)
    [output] = tmp_path.glob("shards-from-*")
    manifest = manifests.load(str(output)).manifest
    assert sum(split.num_samples for split in manifest.splits.values()) == 12
    assert len(manifest.classes) == {"Flat folders": 2, "Arrays": 3, "COCO": 1}.get(title, 0)
    if title in BOXES:
        found = [
            (one["category_id"], pytest.approx(one["bbox"]))
            for split in manifest.splits
            for fields in samples_of(output, manifest, split).values()
            for one in json.loads(fields["json"])["annotations"]
        ]
        assert BOXES[title] in found
        assert len(found) == 1 + (title == "YOLO")


def test_the_page_about_migrating_has_no_section_that_is_not_run() -> None:
    text = page("docs/how-to/migrate.md")
    assert re.findall(r"^## (.*)$", text, flags=re.M) == [ANY_LOOP, *SECTIONS, *FORMS]
    assert not steps_of(text.split("\n## ")[0])


# --- docs/how-to/help.md: each message is one that the code gives -----------------------------

MESSAGES: list[str] = re.findall(r"```text\n(.*?)\n```", page("docs/how-to/help.md"), flags=re.S)
# What the rest of these need (a run, a second process, a bucket) takes seconds each; their own
# tests provoke them.
ELSEWHERE = (
    "process 4711 on host-1",
    "NotFinite: the loss is nan",
    "ReadTimeoutError",
    "the server answered 429",
)
BUILDS = {
    "fotos: no files there": "folder --input fotos",
    "flat: found images": "folder --input flat",
    "TooManyBad": "folder --input bad",
    "is in the input": "folder --input photos --output photos/shards",
    "another shard set": "folder --input photos --holdout test=0.2 --output shards",
    "can't fill": "folder --input photos --num-shards 100",
    "--holdout with splits already": "folder --input sp --holdout test=0.1",
    "columns a, b": "listing --input odd.csv",
    "none of its 2 images": "listing --input moved.csv",
    "all numbers or all names": "listing --input mixed.csv",
    "cut at byte 5000 inside": "webdataset --input cut-000000.tar",
}
RUNS = {
    "optimizer.learnin_rate": (
        "train --manifest shards --run-dir run --set optimizer.learnin_rate=1"
    ),
    "norun: no config.json": "evaluate --run-dir norun",
}


def message_with(words: str) -> str:
    """The one message of the page that has these words."""
    (found,) = [message for message in MESSAGES if words in message]
    return found


def write_what_goes_wrong(place: Path) -> None:
    """The inputs of the page's messages."""
    write_class_folders(place / "photos", ["cat", "dog"], 40)
    shutil.copytree(place / "photos/cat", place / "flat")
    shutil.copytree(place / "photos", place / "bad")
    for number in range(12):
        (place / f"bad/cat/x{number}.png").write_text("no")
    for split in ("train", "test"):
        shutil.copytree(place / "photos", place / "sp" / split)
    (place / "odd.csv").write_text("a,b\nphotos/cat/000.png,1\n")
    (place / "moved.csv").write_text("path,label\nphotos/cat/000,a\nphotos/dog/000,b\n")
    (place / "mixed.csv").write_text("path,label\nphotos/cat/000.png,1\nphotos/dog/000.png,dog\n")
    made = "build --source folder --input photos --holdout test=0.1 --output shards --no-report"
    assert pipelines(made.split()) == 0
    (place / "cut-000000.tar").write_bytes(
        (place / "shards/train/train-000000.tar").read_bytes()[:5000]
    )


@pytest.mark.slow
def test_every_message_of_building_and_training_is_what_the_programs_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_what_goes_wrong(tmp_path)
    for number, (words, options) in enumerate(BUILDS.items()):
        output = "" if "--output" in options else f" --output out-{number}"
        assert pipelines(f"build --source {options}{output}".split()) != 0
        assert message_with(words) in capsys.readouterr().err.replace(f"{tmp_path}/", ""), words
    for words, command in RUNS.items():
        assert trainer(command.split()) == 2
        assert message_with(words) in capsys.readouterr().err.replace(f"{tmp_path}/", "")


def stream(url: str = "shards", split: str = "train", **given: Any) -> shardset.Stream:
    if "global_batch_size" not in given:
        given["batch_size"] = 8
    return shardset.Stream(url, split, image_size=32, **given)


@mock.patch.dict(os.environ, WORLD_SIZE="2")
def one_of_two() -> None:
    stream()


def of_another_seed() -> None:
    stream(seed=1).load_state_dict(stream().state_dict())


def damaged() -> None:
    tar = Path("shards/train/train-000000.tar")
    content = bytearray(tar.read_bytes())
    content[content.find(b"IDAT") + 6] ^= 1
    tar.write_bytes(content)
    list(stream())


@mock.patch.object(sys, "executable", "/usr/bin/python3")
def without_beam() -> None:
    raise ModuleNotFoundError(missing_library(ModuleNotFoundError(name="apache_beam"), "pipelines"))


def out_of_memory() -> None:
    said = "CUDA out of memory. Tried to allocate 392.00 MiB.\nGPU 0 has ..."
    with memory_errors():
        raise torch.OutOfMemoryError(said)


READS: dict[str, Callable[[], object]] = {
    "nowhere": lambda: stream("nowhere"),
    "no split 'val'": lambda: stream(split="val"),
    "WORLD_SIZE is 2": one_of_two,
    "stream[0]": lambda: stream()[0],
    "a global batch of 10": lambda: stream(global_batch_size=10, rank=0, world_size=11),
    "BudgetTooSmall": lambda: stream(budget_bytes=1000),
    "from that state": of_another_seed,
    "DamagedShard": damaged,
    "the library apache_beam": without_beam,
    "memory is too small": out_of_memory,
}


@pytest.mark.parametrize("words", READS)
def test_every_message_of_reading_is_what_is_raised(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(text: str) -> str:
        """A message of damage without its numbers, which follow from the samples."""
        return re.sub(r"'[^']*'|\b[0-9a-f]{8}\b|\d+", "#", text) if act is damaged else text

    monkeypatch.chdir(tmp_path)
    new_set({"test": png_samples("test", 8), "train": png_samples("train", 40)}, "shards")
    act = READS[words]
    with pytest.raises((ShardsetError, TrainingError, ModuleNotFoundError)) as caught:
        act()
    found = f"{type(caught.value).__name__}: {caught.value}".replace(f"{tmp_path}/", "")
    assert told(found).startswith(told(message_with(words)))


def test_no_message_of_the_page_goes_without_a_test() -> None:
    tested = [*BUILDS, *RUNS, *ELSEWHERE, *READS]
    assert sorted(map(message_with, tested)) == sorted(MESSAGES)
