"""What the build writes, every reader reads: the same samples, byte for byte the raw files."""

import io
import re
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image
from pyarrow import parquet

from pipelines import cli as pipelines
from pipelines.build import build
from shardset.decode.crops import CenterCrop
from shardset.decode.image import ImageSpec
from shardset.format import naming
from shardset.format.images import MAX_PIXELS
from shardset.format.manifest import Manifest
from shardset.format.rows import fields_of
from shardset.stream.stream import Stream
from tests.makers.built import HERE, config_of, manifest_of
from tests.makers.folders import write_images
from trainer import cli as trainer

CLASSES = ["cat", "dog", "owl"]
FIELDS = ["png", "jpg", "ppm", "cls"]
NAMES = {
    "train": (
        [f"{name}/{number:03d}.png" for name in CLASSES for number in range(4)]
        + ["cat/no. 7, naïve.png", "dog/photo.JPEG", "owl/plain.ppm", "owl/" + "long" * 30 + ".png"]
    ),
    "test": [f"{name}/{number:03d}.png" for name in CLASSES for number in range(2)],
}

Samples = dict[str, dict[str, bytes]]


@dataclass(frozen=True)
class Built:
    """A built set, and what must be in it: split -> key -> field -> content."""

    folder: Path
    manifest: Manifest
    expected: dict[str, Samples]

    def tars(self, split: str) -> list[Path]:
        return [self.folder / shard.path for shard in self.manifest.split(split).shards]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A set of three shards and one."""
    folder = tmp_path_factory.mktemp("contract")
    raw = write_images(
        folder / "raw", [f"{split}/{name}" for split, names in NAMES.items() for name in names]
    )
    build(config_of(raw, folder / "set", num_shards={"train": 3, "test": 1}), HERE)
    found = {split: expected(raw, split) for split in NAMES}
    return Built(folder / "set", manifest_of(folder / "set"), found)


def expected(raw: Path, split: str) -> Samples:
    """key -> field -> content, from the raw files alone."""
    found = {}
    for name in NAMES[split]:
        stem, _, extension = f"{split}/{name}".rpartition(".")
        key = stem if naming.is_key(stem) else naming.short_key(f"{split}/{name}\0{stem}")
        label = str(CLASSES.index(name.partition("/")[0])).encode()
        field = {"JPEG": "jpg"}.get(extension, extension)
        found[key] = {field: (raw / split / name).read_bytes(), "cls": label}
    assert len(found) == len(NAMES[split])
    return found


def by_gnu_tar(built: Built, split: str) -> Samples:
    def run(*arguments: str) -> bytes:
        return subprocess.run(["tar", *arguments], capture_output=True, check=True).stdout

    found: Samples = {}
    for path in map(str, built.tars(split)):
        for name in run("tf", path).decode("ascii").splitlines():
            key, field = naming.split_member(name)
            assert field not in found.setdefault(key, {})
            found[key][field] = run("xOf", path, name)
    return found


def by_stock_webdataset(built: Built, split: str) -> Samples:
    last = len(built.tars(split)) - 1
    # the names that its brace ranges give
    pattern = f"{built.folder}/{split}/{split}-{{000000..{last:06d}}}.tar"
    found = list(webdataset.WebDataset(pattern, shardshuffle=False))
    samples = {
        sample["__key__"]: {name: sample[name] for name in FIELDS if name in sample}
        for sample in found
    }
    assert len(samples) == len(found)
    return samples


def by_parquet_and_byte_ranges(built: Built, split: str) -> Samples:
    found = {}
    for shard in built.manifest.split(split).shards:
        data = (built.folder / shard.path).read_bytes()
        for row in parquet.read_table(built.folder / shard.index.path).to_pylist():
            places = {
                name: (row[f"{name}.offset"], row[f"{name}.bytes"]) for name in fields_of(row)
            }
            found[row["key"]] = {
                name: data[at : at + size] for name, (at, size) in places.items() if at
            }
    return found


def by_the_trainer_s_stream(built: Built, split: str) -> Samples:
    found: Samples = {}
    stored = built.manifest.split(split).fields
    stream = Stream(
        str(built.folder), split, batch_size=4, seed=7, image=None, fields=stored, with_key=True,
        num_threads=2,
    )  # fmt: skip
    for batch in stream.epoch(0):
        for slot in np.flatnonzero(batch["weight"]):
            assert batch["key"][slot] not in found
            found[batch["key"][slot]] = {
                name: batch[name][slot] for name in stored if batch[name][slot] is not None
            }
            assert str(batch["label"][slot]).encode() == batch["cls"][slot]
    return found


READERS = [by_gnu_tar, by_stock_webdataset, by_parquet_and_byte_ranges, by_the_trainer_s_stream]


@pytest.mark.parametrize("split", NAMES)
@pytest.mark.parametrize("read", READERS)
def test_every_reader_finds_every_raw_file_byte_for_byte(
    built, split, read: Callable[[Built, str], Samples]
):
    assert read(built, split) == built.expected[split]


def test_evaluation_reads_in_stored_order_and_its_pixels_are_those_of_the_raw_files(built):
    (path,) = built.tars("test")
    with tarfile.open(path) as tar:
        stored = list(dict.fromkeys(naming.split_member(info.name)[0] for info in tar))
    image = ImageSpec(size=8, crop=CenterCrop(8))
    batches = list(
        Stream(
            str(built.folder), "test", batch_size=1, seed=None, image=image, with_key=True
        ).epoch(0)
    )
    assert [key for batch in batches for key in batch["key"]] == stored
    assert [id_ for batch in batches for id_ in batch["id"]] == list(range(len(stored)))
    for key, batch in zip(stored, batches, strict=True):
        raw = Image.open(io.BytesIO(built.expected["test"][key]["png"])).convert("RGB")
        assert np.array_equal(batch["image"][0], np.asarray(raw))


def test_a_built_set_has_equal_shards_and_passes_the_deep_verification(built):
    assert [group.promises for group in built.manifest.groups] == 2 * [
        ["equal", "mixed", "reproducible"]
    ]
    assert pipelines.main(["verify", str(built.folder), "--deep"]) == 0


def test_a_set_whose_indexes_another_arrow_wrote_is_the_same(built, tmp_path, monkeypatch):
    written = parquet.ParquetWriter
    monkeypatch.setattr(
        parquet,
        "ParquetWriter",
        lambda *where, **options: written(*where, **{**options, "compression": "gzip"}),
    )
    config = config_of(
        built.folder.parent / "raw", tmp_path / "set", num_shards={"train": 3, "test": 1}
    )
    build(config, HERE)
    other = replace(built, folder=tmp_path / "set", manifest=manifest_of(tmp_path / "set"))
    shard = built.manifest.split("test").shards[0]
    assert other.manifest.split("test").shards[0].index.crc32c != shard.index.crc32c
    assert other.manifest.digest == built.manifest.digest
    assert by_the_trainer_s_stream(other, "test") == built.expected["test"]
    assert pipelines.main(["verify", str(other.folder), "--deep"]) == 0


def test_the_pixel_limit_of_both_sides_is_that_of_pillow():
    assert Image.MAX_IMAGE_PIXELS is not None
    assert MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS


def test_estimate_refuses_the_budget_that_the_trainer_refuses_and_names_the_same_that_is_enough(
    built, capsys
):
    estimate = f"estimate {built.folder} --global-batch-size 4 --image-size 256 --budget-bytes "
    assert pipelines.main(f"{estimate} 1000000".split()) == 2
    estimated = re.findall(r"--budget-bytes (\d+)", " ".join(capsys.readouterr().out.split()))
    size = "--global-batch-size 4 --set image.size=256 --set image.eval_resize=256"
    bench = f"bench-input --manifest {built.folder} {size} --set budget_bytes="
    assert trainer.main(f"{bench}1000000".split()) == 2
    (enough,) = re.findall(r"--set budget_bytes=(\d+)", capsys.readouterr().err)
    assert [*map(int, estimated)] == [int(enough)]
    assert trainer.main(f"{bench}{enough}".split()) == 0
    assert pipelines.main(f"{estimate} {enough}".split()) == 0
