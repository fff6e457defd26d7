"""The writer for any loop: its sets are those of a build to every reader, and nothing half-written
stays.
"""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import shardset
from pipelines.check.verify import verify
from shardset.errors import ConfigError, ShardsetError, UndecodableImage
from shardset.format import manifest as manifests
from shardset.format.labels import MAX_UNUSED
from shardset.storage.open import open_storage
from tests.makers import odd_images
from tests.makers.shardset import pixels

EXACT = shardset.ImageSpec(size=16, crop=shardset.CenterCrop(16))
"""Pixels as they are stored."""


def jpeg(number: int, side: int = 16) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(number, side, side)).save(file, "JPEG", quality=95)
    return file.getvalue()


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write_mixed(output: str) -> None:
    """Ten samples for train, of JPEGs, colour and grey pixels, and three without labels for val."""
    with shardset.Writer(output, samples_per_shard=4, classes=["cat", "dog", "owl"]) as writer:
        for number in range(10):
            grid = pixels(number, 16, 16)
            images: list = [jpeg(number), grid, grid[:, :, 0]]
            note = {"number": number} if number > 6 else None
            writer.write(image=images[number % 3], label=number % 3, key=f"a/{number}", json=note)
        for number in range(3):
            writer.write(image=pixels(number, 200, 200), split="val")


def test_a_written_set_is_whole_and_read_like_a_built_one(tmp_path: Path) -> None:
    write_mixed(str(tmp_path / "set"))
    manifest = manifests.load(str(tmp_path / "set")).manifest
    train = manifest.split("train")
    assert [shard.num_samples for shard in train.shards] == [4, 4, 2]
    assert train.fields == ["jpg", "cls", "png", "json"]
    assert train.class_totals == [4, 3, 3]
    assert train.groups[0].promises == ["reproducible"]
    assert manifest.split("val").class_totals == [0, 0, 0]
    assert verify(str(tmp_path / "set"), deep=True).problems == ()
    stream = shardset.Stream(
        str(tmp_path / "set"), "train", batch_size=4, image=EXACT, with_key=True
    )
    keys = {key for batch in stream for key in batch["key"]}
    assert keys == {f"a/{number}" for number in range(10)}
    samples = shardset.open(str(tmp_path / "set"), "train")
    assert [samples[f"a/{number}"].label for number in range(10)] == [n % 3 for n in range(10)]
    assert np.array_equal(samples["a/1"].image, pixels(1, 16, 16))
    assert np.array_equal(samples["a/2"].image, np.repeat(pixels(2, 16, 16)[:, :, :1], 3, axis=2))
    assert samples["a/3"].fields == {"jpg": jpeg(3), "cls": b"0"}
    assert samples["a/8"].fields["json"] == b'{"number":8}'


def test_the_same_samples_make_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_mixed(str(tmp_path / name))
    for file in files_in(tmp_path / "one"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), (
            file
        )


def test_without_names_a_number_in_any_form_is_the_label_and_a_key_is_the_number_of_the_sample(
    tmp_path: Path,
) -> None:
    with shardset.Writer(tmp_path / "set") as writer:
        for label in ("5", None, np.float32(2), np.int64(0)):
            writer.write(image=jpeg(0), label=label)
    samples = shardset.open(str(tmp_path / "set"), "train")
    assert [samples[number].key for number in range(3)] == ["000000000", "000000001", "000000002"]
    manifest = manifests.load(str(tmp_path / "set")).manifest
    assert [info.name for info in manifest.classes] == ["0", "1", "2", "3", "4", "5"]
    assert manifest.split("train").class_totals == [1, 0, 1, 0, 0, 1]
    assert manifest.provenance.notes == [
        "labels are 0 to 5, 3 of them unused",
        "1 of 4 samples have no label",
    ]


@pytest.mark.parametrize(("first", "label"), [(0, 10**7), (0, 900_000), (None, MAX_UNUSED + 1)])
def test_a_label_that_is_an_id_is_refused_at_its_sample(
    tmp_path: Path, first: int | None, label: int
) -> None:
    with shardset.Writer(tmp_path / "set") as writer:
        writer.write(image=jpeg(0), label=first)
        with pytest.raises(ConfigError, match=r"sample 1 \('000000001'\): label"):
            writer.write(image=jpeg(0), label=label)
        writer.write(image=jpeg(0), label=3)
    assert len(manifests.load(str(tmp_path / "set")).manifest.classes) == 4


@pytest.mark.gcs
def test_it_writes_into_a_bucket(gcs_root: str) -> None:
    write_mixed(gcs_root)
    assert verify(gcs_root, deep=True).problems == ()


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"image": odd_images.jpeg()[:60]}, UndecodableImage, r"sample 1 \('000000001'\)"),
        (
            {"image": np.zeros((8, 8, 4), np.uint8)},
            ConfigError,
            r"pixels are uint8 \[8, 8, 4\], expected uint8",
        ),
        (
            {"image": Image.new("RGB", (8, 8))},
            ConfigError,
            r"image is of type Image, expected bytes, or an array of its pix",
        ),
        ({"json": "a caption"}, ConfigError, "json is of type str, .* a caption is txt"),
        ({"json": b'{"cut": '}, ConfigError, "json is of type bytes, and json can't store it"),
        ({"json": {"a": 1j}}, ConfigError, "can't store it .of type complex"),
        ({"fields": {"emb.npy": [1, 2]}}, ConfigError, "emb.npy is of type list, .* npy for arr"),
        ({"fields": {"emb.npy": np.array([None])}}, ConfigError, "emb.npy is object .1., and npy"),
        ({"fields": {"mask.png": np.zeros((8, 8))}}, ConfigError, r"mask.png is float64 \[8, 8\]"),
        ({"fields": {"note": "a"}}, ConfigError, "note is of type str, expected bytes.* txt for"),
        ({"fields": {"x": np.zeros(3).data}}, ConfigError, "x is of type memoryview"),
        ({"label": np.float32(0.5)}, ConfigError, r"label is (np\.float32\()?0\.5"),
        ({"label": 2}, ConfigError, "label is 2, expected 0 to 1"),
        ({"label": -1}, ConfigError, "label is -1, expected 0 to 1; use None"),
        ({"label": "cat"}, ConfigError, "label is 'cat', expected a whole number"),
        ({"key": "first"}, ConfigError, "the key was used before"),
        ({"key": "a.b"}, ConfigError, "not a key; use"),
        (
            {"split": "versions"},
            ConfigError,
            "'versions' can't name a split; use letters, .* folders of the set itself",
        ),
    ],
)
def test_what_can_not_be_stored_is_named_and_the_next_sample_may_follow(
    tmp_path: Path, changes: dict, error: type[ShardsetError], sentence: str
) -> None:
    with shardset.Writer(tmp_path / "set", classes=["cat", "dog"]) as writer:
        writer.write(image=jpeg(0), label=0, key="first")
        with pytest.raises(error, match=sentence):
            writer.write(**{"image": jpeg(1), "label": 1, **changes})
        writer.write(image=jpeg(2), label=1)
    assert manifests.load(str(tmp_path / "set")).manifest.split("train").num_samples == 2


def test_an_exception_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    def write_five() -> None:
        with shardset.Writer(tmp_path / "set", samples_per_shard=2) as writer:
            for number in range(6):
                writer.write(image=jpeg(60 // (5 - number)), split="train" if number else "val")

    with pytest.raises(ZeroDivisionError):
        write_five()
    assert files_in(tmp_path) == []
    with (
        pytest.raises(ConfigError, match="no sample was written"),
        shardset.Writer(tmp_path / "set"),
    ):
        pass
    assert files_in(tmp_path) == []


def test_it_writes_neither_over_a_set_nor_over_what_a_killed_writer_left(tmp_path: Path) -> None:
    code = (
        "import os, shardset; writer = shardset.Writer('set', samples_per_shard=1).__enter__()\n"
        f"writer.write(image={jpeg(0)!r}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path)
    left = files_in(tmp_path)
    assert "set/train/train-000000.tar" in left
    expected = (
        r"set/train/train-000000\.tar: left by a writer or a build that was stopped; remove the"
        r" folder train/"
    )
    with pytest.raises(ConfigError, match=expected), shardset.Writer(tmp_path / "set") as writer:
        writer.write(image=jpeg(0))
    assert files_in(tmp_path) == left
    write_mixed(str(tmp_path / "whole"))
    whole = files_in(tmp_path / "whole")
    with pytest.raises(ConfigError, match="there is a shard set already; choose another output"):
        shardset.Writer(open_storage(str(tmp_path / "whole")))
    assert files_in(tmp_path / "whole") == whole
