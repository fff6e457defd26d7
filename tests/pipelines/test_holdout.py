import itertools
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import BuildConfig
from pipelines.holdout import Holdout
from pipelines.sources import open_source
from shardset.errors import ConfigError
from shardset.storage.base import Storage
from tests.makers.folders import write_class_folders, write_csv
from tests.makers.images import image_bytes
from tests.makers.shardset import put
from tests.makers.spools import read

KEYS = [f"cat/{number:05d}" for number in range(4000)]


def test_fractions_are_kept_within_chance():
    counts = Counter(map(Holdout({"test": 0.1, "validation": 0.3}, seed=1).split_of, KEYS))
    assert 330 < counts.pop("test") < 470
    assert 1080 < counts.pop("validation") < 1320
    assert counts.keys() == {"train"}


def test_the_order_of_the_splits_does_not_matter_and_without_any_everything_is_train():
    first, second = Holdout({"a": 0.2, "b": 0.3}, seed=1), Holdout({"b": 0.3, "a": 0.2}, seed=1)
    assert [*map(first.split_of, KEYS[:500])] == [*map(second.split_of, KEYS[:500])]
    assert {*map(Holdout({}, seed=1).split_of, KEYS[:100])} == {"train"}


def test_another_seed_holds_out_other_samples():
    chosen = [
        {key for key in KEYS if Holdout({"test": 0.1}, seed).split_of(key) == "test"}
        for seed in (1, 2)
    ]
    assert 0 < len(chosen[0] & chosen[1]) < 0.25 * len(chosen[0])


def test_the_same_sample_twice_is_in_one_split_twice():
    classes = Holdout({"test": 0.1}, seed=3).by_class(
        lambda: [("x", 0), ("x", 0), ("y", 1), ("y", 1), ("z", 1)]
    )
    assert classes.split_of("x", 0) == "train"
    assert {classes.split_of("y", 1), classes.split_of("z", 1)} == {"train", "test"}


def test_a_holdout_is_frozen():
    # Held-out samples of existing sets. To change them is to leak test samples into training.
    chosen = [key for key in KEYS[:60] if Holdout({"test": 0.1}, seed=7).split_of(key) == "test"]
    assert chosen == ["cat/00004", "cat/00033", "cat/00046", "cat/00050"]


# --- classes

KEYS_BY_CLASS = st.dictionaries(
    st.sampled_from("abcdef"), st.sets(st.integers(0, 10**6), min_size=1, max_size=40)
)
FRACTIONS = st.one_of(
    st.dictionaries(st.sampled_from(["a", "b", "validation"]), st.floats(1e-6, 0.33), min_size=1),
    st.fixed_dictionaries({"test": st.floats(1e-6, 1 - 1e-6)}),
)


def by_class(holdout: Holdout, keys: dict[str, set[int]]) -> dict[str, dict[int, str]]:
    """The split of each key of each class."""
    classes = holdout.by_class(
        lambda: [(str(key), label) for label, some in keys.items() for key in some]
    )
    return {
        label: {key: classes.split_of(str(key), label) for key in some}
        for label, some in keys.items()
    }


@given(KEYS_BY_CLASS, FRACTIONS, st.integers(0, 99))
def test_every_class_with_enough_samples_has_one_in_every_split(keys, fractions, seed):
    for splits in by_class(Holdout(fractions, seed), keys).values():
        wanted = {*fractions, "train"}
        if len(splits) >= len(wanted):
            assert set(splits.values()) == wanted
        assert len(set(splits.values())) >= min(2, len(splits))
        assert "train" in splits.values()


@given(KEYS_BY_CLASS, FRACTIONS, st.integers(0, 99))
def test_a_class_that_has_every_split_by_its_fractions_is_divided_by_them_alone(
    keys, fractions, seed
):
    holdout = Holdout(fractions, seed)
    for label, splits in by_class(holdout, keys).items():
        plain = {key: holdout.split_of(str(key)) for key in keys[label]}
        if {*plain.values()} == {*fractions, "train"}:
            assert splits == plain


@given(
    st.sets(st.integers(0, 10**6), min_size=2, max_size=60), st.integers(1, 59), st.integers(0, 99)
)
def test_a_growing_class_moves_at_most_the_one_sample_that_a_split_had_been_lent(
    keys, num_old, seed
):
    holdout, every = Holdout({"test": 0.1}, seed), sorted(keys, key=str)
    old = by_class(holdout, {"cat": {*every[:num_old]}})["cat"]
    new = by_class(holdout, {"cat": {*every}})["cat"]
    moved = [key for key in old if old[key] != new[key]]
    assert len(moved) <= 1
    plain = {holdout.split_of(str(key)) for key in old}
    if "train" in plain and len(old) > 1:  # else the class lent a sample to train
        assert all(old[key] == "test" for key in moved)
    if plain == {"train", "test"}:
        assert not moved


def test_the_samples_that_small_classes_hold_out_are_frozen():
    # Held-out samples of existing sets. To change them is to leak test samples into training.
    keys = {name: {*range(number)} for number, name in enumerate("abcdef", start=1)}
    split = by_class(Holdout({"test": 0.1}, seed=7), keys)
    chosen = {label: [key for key in some if some[key] == "test"] for label, some in split.items()}
    assert chosen == {"a": [], "b": [0], "c": [0], "d": [0], "e": [0], "f": [5]}


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
    return [sample.split == "test" for sample in read(open_source(config))]


def write_listing(folder: Path, paths: list[str]) -> None:
    write_csv(folder / "list.csv", ["path", "label"], [[path, 0] for path in paths])


EXPECTED = [Holdout({"test": 0.3}, 5).split_of(path[:-4]) == "test" for path in IMAGES]
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
        Holdout({"test": 0.3}, 5).split_of(f"{photos}/{path[:-4]}".lstrip("/")) == "test"
        for path in IMAGES
    ]
    assert chosen("listing", f"{tmp_path}/list.csv") == whole


def test_a_split_that_is_left_empty_is_noted():
    holdout = Holdout({"test": 0.1}, seed=1)
    assert list(holdout.notes({("train", 0)}, ["cat"])) == [
        "--holdout test=0.1 left no image in split test, so there is no such split"
    ]
    assert list(holdout.notes({("train", 0), ("test", 0)}, ["cat"])) == []
