"""`plan` of archives: small ones are counted as by a build, of large ones little is read and more is assumed."""

import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import __main__ as command
from pipelines import sources
from pipelines.build import build
from pipelines.config import BuildConfig
from pipelines.estimate import archives
from pipelines.estimate.archives import SAMPLED_ARCHIVES, SAMPLED_BYTES, Found
from pipelines.estimate.inputs import from_listing, from_manifest
from pipelines.sources.base import RawSample, Survey
from pipelines.sources.imagenet import ImageNet
from pipelines.sources.webdataset import WebDataset, find
from shardset.errors import ConfigError, SourceError
from shardset.format.tar import StoredSample
from shardset.storage.base import Stat, Storage
from shardset.storage.open import open_storage
from tests.makers import cifar, imagenet
from tests.makers.folders import write_class_folders
from tests.makers.images import image_bytes
from tests.makers.shardset import write_shard_set
from tests.makers.tars import plain, tar_bytes, tar_of

HERE = ["--direct_running_mode=in_memory"]


@dataclass
class Counting:
    """A storage that counts the bytes that are read of it, by name."""

    inner: Storage
    read_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def is_remote(self) -> bool:
        return self.inner.is_remote

    @property
    def reads_at_once(self) -> int:
        return self.inner.reads_at_once

    def list(self, prefix: str = "") -> Iterator[Stat]:
        return self.inner.list(prefix)

    def stat(self, name: str) -> Stat:
        return self.inner.stat(name)

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> bytes:
        data = self.inner.read(name, start, stop, generation=generation)
        self.read_bytes[name] = self.read_bytes.get(name, 0) + len(data)
        return data


def sparse(path: Path, num_bytes: int) -> Path:
    """A file of that size whose bytes are all 0: whoever reads it finds no archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        os.truncate(file.fileno(), num_bytes)
    return path


def config_of(source: str, raw: Path | str, **changes: Any) -> BuildConfig:
    return BuildConfig(source=source, input=str(raw), output="", **changes)


def abouts(found: Any) -> list[str]:
    return [assumption.about for assumption in found.assumptions]


# --- small ones, and ours: the numbers of a build ---------------------------------------------------------------------


def imagenet_archives(folder: Path) -> Path:
    return imagenet.put(folder, imagenet.archives(imagenet.images()))


def imagenet_without_validation(folder: Path) -> Path:
    files = imagenet.archives(imagenet.images(num_train=5))
    return imagenet.put(folder, {name: files[name] for name in files if "val" not in name})


def tars(folder: Path, format: int = tarfile.PAX_FORMAT) -> Path:
    """Three tars of two splits as others write them, with a field that some samples lack."""
    for name, numbers in {"train-0.tar": range(9), "train-1.tar": range(9, 20), "test-0.tar": range(20, 26)}.items():
        files = {}
        for number in numbers:
            files[f"{number:03d}.jpg"] = image_bytes(number, "jpg")
            files[f"{number:03d}.cls"] = str(number % 3).encode()
            files |= {f"{number:03d}.json": b'{"a": 1}'} if number % 2 else {}
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(tar_bytes(files, format))
    return folder


def ours(folder: Path) -> Path:
    raw = write_class_folders(folder / "raw", ["cat", "dog"], 8)
    build(BuildConfig(source="folder", input=str(raw), output=str(folder / "set"), holdout={"test": 0.25}), HERE)
    return folder / "set"


def ours_without_manifest(folder: Path) -> Path:
    (ours(folder) / "manifest.json").unlink()
    return folder / "set"


@pytest.mark.parametrize(
    ("source", "make"),
    [
        ("imagenet", imagenet_archives),
        ("imagenet", imagenet_without_validation),
        ("webdataset", tars),
        ("webdataset", ours),
        ("webdataset", ours_without_manifest),
    ],
)
def test_small_archives_and_shard_sets_foresee_what_a_build_makes(tmp_path, source, make: Callable[[Path], Path]):
    config = BuildConfig(source=source, input=str(make(tmp_path / "raw")), output=str(tmp_path / "out"))
    foreseen = from_listing(config)
    build(config, HERE)
    made = from_manifest(str(tmp_path / "out"))
    assert foreseen.assumptions == []
    assert foreseen.num_classes == made.num_classes
    assert foreseen.splits.keys() == made.splits.keys()
    for name, split in made.splits.items():
        assert foreseen.splits[name].shard_sizes == split.shard_sizes
        assert foreseen.splits[name].num_bytes == split.num_bytes
        assert foreseen.splits[name].plan.fields == split.plan.fields
        assert sum(foreseen.splits[name].index_bytes) == pytest.approx(sum(split.index_bytes), rel=0.05)


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
@pytest.mark.parametrize("files_of", [cifar.python_files, cifar.binary_files])
def test_extracted_cifar_files_tell_their_rows_and_the_size_of_pictures(tmp_path, kind, files_of):
    batches = cifar.cifar10(12) if kind == "cifar10" else cifar.cifar100(36)
    config = BuildConfig(
        source=kind, input=str(cifar.write_folder(tmp_path / "raw", files_of(batches))), output=str(tmp_path / "out")
    )
    foreseen = from_listing(config)
    build(config, HERE)
    made = from_manifest(str(tmp_path / "out"))
    assert foreseen.num_classes == made.num_classes
    for name, split in made.splits.items():
        # A pickle has some bytes more than its rows, which count where they are as few as here.
        assert abs(foreseen.splits[name].plan.num_stored - split.plan.num_stored) <= (files_of is cifar.python_files)
        assert foreseen.splits[name].plan.fields == split.plan.fields
        assert foreseen.splits[name].index_bytes[0] == split.index_bytes[0]
        if files_of is cifar.binary_files:
            assert foreseen.splits[name].tar_bytes == split.tar_bytes
    about_samples = ["samples"] if files_of is cifar.python_files else []
    assert abouts(foreseen) == about_samples + (["bytes"] if kind == "cifar100" else [])


# --- published ones: by their size ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "files", "counts", "num_classes"),
    [
        ("cifar10", {"cifar-10-python.tar.gz": 170_498_071}, {"train": 50_000, "test": 10_000}, 10),
        ("cifar10", {"cifar-10-binary.tar.gz": 170_052_171}, {"train": 50_000, "test": 10_000}, 10),
        ("cifar100", {"cifar-100-python.tar.gz": 169_001_437}, {"train": 50_000, "test": 10_000}, 100),
        ("cifar100", {"cifar-100-binary.tar.gz": 168_513_733}, {"train": 50_000, "test": 10_000}, 100),
        ("imagenet", {"ILSVRC2012_img_train.tar": 147_897_477_120}, {"train": 1_281_167}, 1000),
        (
            "imagenet",
            {
                "ILSVRC2012_img_train.tar": 147_897_477_120,
                "ILSVRC2012_img_val.tar": 6_744_924_160,
                "ILSVRC2012_devkit_t12.tar.gz": 2_568_145,
            },
            {"train": 1_281_167, "validation": 50_000},
            1000,
        ),
    ],
)
def test_an_archive_of_the_published_size_is_taken_for_the_published_one_and_not_read(
    tmp_path, source, files, counts, num_classes
):
    for name, size in files.items():
        sparse(tmp_path / name, size)
    found = from_listing(config_of(source, tmp_path))
    assert {name: split.plan.num_stored for name, split in found.splits.items()} == counts
    assert found.num_classes == num_classes
    assert "samples" in abouts(found)
    assert all(f"{size:,}" in found.assumptions[0].text for name, size in files.items() if "devkit" not in name)


def test_a_shard_set_whose_samples_have_many_fields_is_planned(tmp_path):
    fields = [(f"meta{number}.txt", b"x") for number in range(100)]
    samples = [StoredSample(key=f"s{number}", fields=fields, label=-1, source=number) for number in range(8)]
    write_shard_set(open_storage(str(tmp_path / "set")), {"train": samples}, num_shards=2)
    config = BuildConfig(source="webdataset", input=str(tmp_path / "set"), output=str(tmp_path / "out"))
    assert len(from_listing(config).splits["train"].plan.fields) == 100


def test_imagenet_takes_as_much_as_its_archives_without_headers_and_with_labels(tmp_path):
    sparse(tmp_path / "ILSVRC2012_img_train.tar", 147_897_477_120)
    (split,) = from_listing(config_of("imagenet", tmp_path)).splits.values()
    # A label is a header of 512 bytes and a block of 512.
    assert split.mean_bytes == pytest.approx(147_897_477_120 / 1_281_167 + 1024, rel=1e-4)


def test_a_cifar_archive_of_another_size_is_scaled_and_it_is_said(tmp_path):
    path = cifar.write_archive(
        tmp_path / "cifar-10-python.tar.gz", cifar.python_files(cifar.cifar10(40)), "cifar-10-batches-py"
    )
    found = from_listing(config_of("cifar10", path))
    # Noise can't be compressed, so a picture takes more bytes here than in the published archive.
    assert found.splits["train"].plan.num_stored == pytest.approx(200, rel=0.2)
    assert found.splits["test"].plan.num_stored == pytest.approx(40, rel=0.2)
    assert f"has {path.stat().st_size:,} bytes and the published archive 170,498,071" in found.assumptions[0].text


def test_validation_images_without_their_labels_are_refused_as_by_a_build(tmp_path):
    sparse(tmp_path / "ILSVRC2012_img_train.tar", 147_897_477_120)
    sparse(tmp_path / "ILSVRC2012_img_val.tar", 6_744_924_160)
    with pytest.raises(SourceError, match=r"without ILSVRC2012_devkit_t12.tar.gz, which holds its labels"):
        from_listing(config_of("imagenet", tmp_path))


# --- others: the first MiB of a few -----------------------------------------------------------------------------------

NUM_TARS, EACH = 12, 24


def bulky(number: int, image: int = 100_000) -> dict[str, bytes]:
    """About 2.4 MB of samples of like sizes."""
    random = np.random.default_rng(number)
    files = {}
    for place in range(EACH):
        key = f"{number:02d}{place:03d}"
        files[f"{key}.jpg"] = random.bytes(image + int(random.integers(-5000, 5000)))
        files[f"{key}.cls"] = str(place % 7).encode()
    return files


def counted(source: Any) -> tuple[Found, dict[str, int]]:
    """What is found in a source, and how many bytes of each object were read for it."""
    object.__setattr__(source, "input", storage := Counting(source.input))
    found = archives.look(source)
    assert found is not None
    return found, storage.read_bytes


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_large_tars_are_estimated_from_their_first_mib(tmp_path, format):
    for number in range(NUM_TARS):
        (tmp_path / f"train-{number:03d}.tar").write_bytes(tar_bytes(bulky(number), format))
    found, read = counted(WebDataset(*find(str(tmp_path))))
    assert found.splits["train"].num_samples == pytest.approx(NUM_TARS * EACH, rel=0.02)
    assert found.splits["train"].num_bytes == pytest.approx(NUM_TARS * EACH * 100_001, rel=0.02)
    assert (found.num_classes, found.num_units) == (7, NUM_TARS)
    assert len(read) == SAMPLED_ARCHIVES
    assert max(read.values()) <= SAMPLED_BYTES
    assert abouts(found) == ["samples", "classes"]
    assert "12 of 12 hold as many samples to a byte as was read in the first MiB of 8" in found.assumptions[0].text


def test_tars_with_an_index_are_counted_by_it_and_only_the_others_are_estimated(tmp_path):
    folder = ours_without_manifest(tmp_path / "ours")
    indexed = from_listing(config_of("webdataset", folder)).splits["train"].plan.num_stored
    (folder / "train" / "other.tar").write_bytes(tar_bytes(bulky(0)))
    found, read = counted(WebDataset(*find(str(folder))))
    assert found.splits["train"].num_samples == pytest.approx(indexed + EACH, abs=1)
    assert {name for name in read if name.endswith(".tar")} == {"train/other.tar"}
    assert "1 of 1 hold" in found.assumptions[0].text


def test_a_tar_that_is_named_is_planned_whatever_else_is_in_its_folder(tmp_path):
    folder = ours_without_manifest(tmp_path / "ours") / "train"
    (folder / "elsewhere").symlink_to("nowhere")
    found = from_listing(config_of("webdataset", folder / "train-000000.tar"))
    assert not found.assumptions
    assert list(found.splits) == ["train"]


def test_imagenet_archives_of_another_size_are_estimated_class_by_class(tmp_path):
    images = [(f"n0144076{number}", number) for number in range(3)]
    inner = {
        f"{wnid}.tar": tar_bytes({f"{wnid}_{name}.JPEG": data for name, data in enumerate(bulky(number).values())})
        for wnid, number in images
    }
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(inner))
    found, read = counted(ImageNet(open_storage(str(tmp_path))))
    # Of 48 files a class half are labels of one byte here, which are images by their name.
    assert found.splits["train"].num_samples == pytest.approx(3 * 2 * EACH, rel=0.1)
    assert sorted(found.splits["train"].strata) == [0, 1, 2]
    assert found.num_classes == 3
    assert read["ILSVRC2012_img_train.tar"] <= 3 * (SAMPLED_BYTES + 3 * 4096) + 4096
    assert abouts(found) == ["samples"]


def test_a_large_validation_archive_holds_what_the_devkit_labels(tmp_path):
    files = imagenet.archives(imagenet.images())
    images = {f"ILSVRC2012_val_{number:08d}.JPEG": bytes(200_000) for number in range(1, len(imagenet.TRUTH) + 1)}
    imagenet.put(tmp_path, files | {"ILSVRC2012_img_val.tar": tar_bytes(images)})
    found = from_listing(config_of("imagenet", tmp_path))
    assert found.splits["validation"].plan.num_stored == len(imagenet.TRUTH)
    assert found.splits["validation"].num_bytes == pytest.approx(len(imagenet.TRUTH) * 201_000, rel=0.05)
    assert "every image is there that ILSVRC2012_devkit_t12.tar.gz labels, 7" in found.assumptions[0].text


def test_unlabelled_samples_have_no_classes(tmp_path):
    (tmp_path / "train-0.tar").write_bytes(tar_bytes({f"{n}.jpg": bytes(100_000) for n in range(30)}))
    found = from_listing(config_of("webdataset", tmp_path))
    assert found.num_classes == 0
    assert found.splits["train"].plan.num_stored == pytest.approx(30, abs=1)


# --- what can't be said -----------------------------------------------------------------------------------------------


def test_samples_larger_than_what_is_read_are_refused_with_the_other_way(tmp_path):
    (tmp_path / "train-0.tar").write_bytes(tar_bytes({"a.jpg": bytes(2 << 20), "b.jpg": bytes(2 << 20)}))
    with pytest.raises(ConfigError, match=r"train: tars: no whole sample in the first MiB of 1 .*give --samples and"):
        from_listing(config_of("webdataset", tmp_path))


def test_a_small_tar_that_is_cut_is_an_error(tmp_path):
    folder = tars(tmp_path)
    path = folder / "train-0.tar"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(SourceError, match="cut at byte 3000"):
        from_listing(config_of("webdataset", folder))


def test_an_index_of_another_tar_is_an_error(tmp_path):
    folder = ours_without_manifest(tmp_path)
    path = next((folder / "train").glob("*.tar"))
    with tarfile.open(path) as tar:
        members = [(plain(member.name, data := tar.extractfile(member).read()), data) for member in tar]
    path.write_bytes(tar_of([*members, (plain("more.jpg", b"x"), b"x")]))
    with pytest.raises(SourceError, match=r"idx\.npy: its samples take .* it is the index of another tar, remove it"):
        from_listing(config_of("webdataset", folder))


def test_a_source_that_has_to_be_read_is_refused_with_the_other_ways(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Strange:
        input: Storage
        name: str = "strange"

        def survey(self) -> Survey:
            return Survey(units=[{}], classes=None)

        def index(self, unit: Any, spool: Any) -> Iterator[RawSample]:
            self.input.read("archive")
            yield from ()

    monkeypatch.setitem(sources.SOURCES, "strange", lambda config: Strange(open_storage(config.input)))
    with pytest.raises(ConfigError, match=r"strange has to be read; give --samples and --mean-bytes .*--dry-run"):
        from_listing(config_of("strange", tmp_path))


# --- how it is shown --------------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], source: str, raw: Path, *words: str) -> str:
    assert command.main(["plan", "--source", source, "--input", str(raw), *words]) == 0
    return capsys.readouterr().out


def test_what_rests_on_an_assumption_is_marked_and_the_assumption_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = sparse(tmp_path / "cifar-10-python.tar.gz", 170_498_071)
    page = shown(capsys, "cifar10", path)
    for row in ("steps *", "order *", "requests *", "memory *", "storage *", "build *"):
        assert f"\n{row} " in page
    assert "* assumed: 50,000 train and 10,000 test pictures: cifar-10-python.tar.gz has the" in page
    found = json.loads(shown(capsys, "cifar10", path, "--json"))
    assert found["exact"] is False
    assert {"splits", "steps", "reads", "memory", "dollars"} <= set(found["assumed"])
    assert set(found["assumed"]) <= set(found)
    assert [each["about"] for each in found["assumptions"]] == ["samples"]


def test_where_only_sizes_are_assumed_the_steps_are_not_marked(tmp_path, capsys):
    raw = cifar.write_folder(tmp_path / "raw", cifar.binary_files(cifar.cifar100(12)))
    page = shown(capsys, "cifar100", raw, "--global-batch-size", "4")
    assert "\nsteps " in page
    assert "\nsteps *" not in page
    assert "\nstorage *" in page
    assert "steps" not in json.loads(shown(capsys, "cifar100", raw, "--global-batch-size", "4", "--json"))["assumed"]


def test_what_was_counted_has_no_mark(tmp_path, capsys):
    page = shown(capsys, "webdataset", tars(tmp_path / "raw"), "--global-batch-size", "4")
    assert "assumed" not in page
    assert " * " not in page
    found = json.loads(shown(capsys, "webdataset", tmp_path / "raw", "--global-batch-size", "4", "--json"))
    assert (found["exact"], found["assumptions"], found["assumed"]) == (True, [], [])
