import itertools
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.begin import prepare
from pipelines.config import BuildConfig
from pipelines.holdout import Holdout
from pipelines.sources import open_source
from shardset.errors import ConfigError
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.folders import write_class_folders, write_csv
from tests.makers.images import image_bytes
from tests.makers.shardset import put
from tests.makers.spools import read
from tests.makers.tars import tar_bytes


def split_of(holdout: Holdout, key: str) -> str:
    """The split of a sample by its key alone."""
    return holdout.place(key, b"")[0]


KEYS = [f"cat/{number:05d}" for number in range(4000)]


def test_fractions_are_kept_within_chance():
    counts = Counter(
        split_of(Holdout({"test": 0.1, "validation": 0.3}, seed=1), key) for key in KEYS
    )
    assert 330 < counts.pop("test") < 470
    assert 1080 < counts.pop("validation") < 1320
    assert counts.keys() == {"train"}


def test_the_order_of_the_splits_does_not_matter_and_without_any_everything_is_train():
    first, second = Holdout({"a": 0.2, "b": 0.3}, seed=1), Holdout({"b": 0.3, "a": 0.2}, seed=1)
    chosen = [[split_of(one, key) for key in KEYS[:500]] for one in (first, second)]
    assert chosen[0] == chosen[1]
    assert {split_of(Holdout({}, seed=1), key) for key in KEYS[:100]} == {"train"}


def test_another_seed_holds_out_other_samples():
    chosen = [
        {key for key in KEYS if split_of(Holdout({"test": 0.1}, seed), key) == "test"}
        for seed in (1, 2)
    ]
    assert 0 < len(chosen[0] & chosen[1]) < 0.25 * len(chosen[0])


def test_a_holdout_is_frozen():
    # Held-out samples of existing sets. To change them is to leak test samples into training.
    chosen = [key for key in KEYS[:60] if split_of(Holdout({"test": 0.1}, seed=7), key) == "test"]
    assert chosen == ["cat/00004", "cat/00033", "cat/00046", "cat/00050"]


@pytest.mark.parametrize(
    "holdout",
    [
        *({"test": fraction} for fraction in (0, 1, -0.1, float("nan"))),
        {"a": 0.5, "b": 0.5},
        {"train": 0.1},
        {"a/b": 0.1},
    ],
)
def test_a_holdout_that_makes_no_sense_is_refused(holdout):
    with pytest.raises(ConfigError, match="--holdout"):
        Holdout(holdout)


# --- the same files, spelled otherwise

IMAGES = [f"{name}/{number:03d}.png" for name in ("cat", "dog") for number in range(30)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_class_folders(tmp_path_factory.mktemp("spelled") / "photos", ["cat", "dog"], 30)


def chosen(source: str, url: str) -> list[bool]:
    """Which samples of an input are held out, in their order."""
    config = BuildConfig(source=source, input=url, output="out", holdout={"test": 0.3}, seed=5)
    holdout = Holdout(config.holdout, config.seed)
    samples = read(open_source(config))
    return [split_of(holdout, one.drawn_by or one.key) == "test" for one in samples]


def write_listing(folder: Path, paths: list[str]) -> None:
    write_csv(folder / "list.csv", ["path", "label"], [[path, 0] for path in paths])


EXPECTED = [split_of(Holdout({"test": 0.3}, 5), path[:-4]) == "test" for path in IMAGES]
"""What the names below the input decide; so listings with relative paths and class folders have
always been split.
"""


def spellings(folder: Path) -> list[str]:
    """The same local folder, written in many ways."""
    near, name = os.path.relpath(folder), folder.name
    far = [f"{folder.parent}/{way}{name}" for way in ("", "./", "/", f"{name}/../")]
    return [near, f"./{near}", *far]


def test_a_holdout_of_class_folders_does_not_depend_on_how_the_input_is_spelled(photos):
    for url in spellings(photos):
        assert chosen("folder", url) == chosen("folder", f"{url}/") == EXPECTED


def test_a_holdout_of_a_listing_does_not_depend_on_how_input_and_paths_are_spelled(photos):
    absolute = [f"{os.path.abspath(one) if one[0] != '/' else one}/" for one in spellings(photos)]
    prefixes = itertools.cycle([*absolute, ""])
    for url in spellings(photos):
        write_listing(photos, [f"{next(prefixes)}{path}" for path in IMAGES])
        assert chosen("listing", f"{url}/list.csv") == EXPECTED


def test_a_holdout_of_a_bucket_is_that_of_the_same_files_on_a_disk(storage: Storage):
    for seed, path in enumerate(IMAGES):
        put(storage, path, image_bytes(seed))
    assert chosen("folder", storage.url) == chosen("folder", f"{storage.url}/") == EXPECTED
    for prefix in ("", f"{storage.url}/"):
        rows = "".join(f"{prefix}{path},0\n" for path in IMAGES)
        put(storage, "list.csv", b"path,label\n" + rows.encode())
        assert chosen("listing", f"{storage.url}/list.csv") == EXPECTED


def test_a_given_key_decides_wherever_the_path_leads(photos, tmp_path):
    for folder, prefix in ((photos, ""), (tmp_path, f"{photos}/")):
        rows = [[prefix + path, 0, path[:-4]] for path in IMAGES]
        write_csv(folder / "list.csv", ["path", "label", "key"], rows)
        assert chosen("listing", f"{folder}/list.csv") == EXPECTED


def test_an_image_outside_of_the_input_is_held_out_by_its_whole_path_as_ever(photos, tmp_path):
    write_listing(tmp_path, [f"{photos}/{path}" for path in IMAGES])
    whole = [
        split_of(Holdout({"test": 0.3}, 5), f"{photos}/{path[:-4]}".lstrip("/")) == "test"
        for path in IMAGES
    ]
    assert chosen("listing", f"{tmp_path}/list.csv") == whole


# --- inputs with splits


@pytest.mark.parametrize("source", ["folder", "listing", "hf", "webdataset"])
def test_a_holdout_of_an_input_with_splits_is_refused_and_one_split_is_divided(tmp_path, source):
    url = tmp_path
    for number, split in enumerate(("train", "test")):
        write_class_folders(tmp_path / split, ["cat"], 2)
        (tmp_path / f"{split}.tar").write_bytes(tar_bytes({"1.png": image_bytes(number)}))
        images = {"image": [image_bytes(number)]}
        pq.write_table(pa.table(images), tmp_path / f"{split}.parquet")
        rows = [["train/cat/000.png", each] for each in ("", "train", split)]
        if source == "listing":
            url = write_csv(tmp_path / "list.csv", ["path", "split"], rows)
        config = BuildConfig(
            source=source, input=str(url), output=f"{tmp_path}-out", holdout={"val": 0.5}
        )
        if split == "train":
            prepare(config, open_storage(config.output))
    with pytest.raises(ConfigError, match=r"--holdout with splits already \(test, train\); leave"):
        prepare(config, open_storage(config.output))
