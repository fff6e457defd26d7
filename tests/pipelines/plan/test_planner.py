import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.begin import prepare
from pipelines.config import BuildConfig
from pipelines.holdout import Holdout
from pipelines.plan import tables
from pipelines.plan.index import index_unit
from pipelines.plan.planner import make_plan, splits_of
from pipelines.plan.survey import units_in
from shardset.storage.open import open_storage
from tests.makers.folders import write_csv, write_images
from tests.makers.images import image_bytes

KEYS_BY_CLASS = st.dictionaries(
    st.sampled_from("abcdef"), st.sets(st.integers(0, 10**6), min_size=1, max_size=40)
)
FRACTIONS = st.one_of(
    st.dictionaries(st.sampled_from(["a", "b", "validation"]), st.floats(1e-6, 0.33), min_size=1),
    st.fixed_dictionaries({"test": st.floats(1e-6, 1 - 1e-6)}),
)


def alone(holdout: Holdout, key: str) -> str:
    return holdout.place(key, b"")[0]


def divided(holdout: Holdout, samples: list[tuple[str, bytes, int]]) -> list[str]:
    """The split of each sample: key, image and label."""
    placed = [holdout.place(key, image) for key, image, _ in samples]
    draws, images = (np.array([one[at] for one in placed], np.uint64) for at in (1, 2))
    labels = np.array([label for *_, label in samples], np.int64)
    return [holdout.splits[number] for number in splits_of(holdout, draws, images, labels)]


def by_class(holdout: Holdout, keys: dict[str, set[int]]) -> dict[str, dict[int, str]]:
    """The split of each key of each class."""
    samples = [(str(key), b"", ord(label)) for label, some in keys.items() for key in some]
    found = iter(divided(holdout, samples))
    return {label: {key: next(found) for key in some} for label, some in keys.items()}


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
        plain = {key: alone(holdout, str(key)) for key in keys[label]}
        if {*plain.values()} == {*fractions, "train"}:
            assert splits == plain


@given(
    st.sets(st.integers(0, 10**6), min_size=2, max_size=60), st.integers(1, 59), st.integers(0, 99)
)
def test_a_growing_class_moves_at_most_the_one_sample_that_a_split_had_been_lent(
    keys, num_old, seed
):
    holdout, every = Holdout({"test": 0.1}, seed), sorted(keys, key=str)
    old = by_class(holdout, {"c": {*every[:num_old]}})["c"]
    new = by_class(holdout, {"c": {*every}})["c"]
    moved = [key for key in old if old[key] != new[key]]
    assert len(moved) <= 1
    plain = {alone(holdout, str(key)) for key in old}
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


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=60), st.integers(0, 9))
def test_equal_images_are_in_one_split_and_another_order_changes_nothing(samples, seed):
    holdout = Holdout({"test": 0.3}, seed)
    rows = [(f"{n}", b"%d" % image, -1) for n, (_, image) in enumerate(samples)]
    splits = divided(holdout, rows)
    assert len({*zip([image for _, image, _ in rows], splits, strict=True)}) == len(
        {image for _, image, _ in rows}
    )
    assert divided(holdout, rows[::-1]) == splits[::-1]
    # each image falls where one of its samples does alone
    plain = {(image, alone(holdout, key)) for key, image, _ in rows}
    assert {*zip([image for _, image, _ in rows], splits, strict=True)} <= plain


def test_five_captions_of_each_image_keep_the_fraction():
    rows = [(f"{n}-{k}", b"%d" % n, -1) for n in range(4000) for k in range(5)]
    assert 330 < divided(Holdout({"test": 0.1}, 1), rows)[::5].count("test") < 470


# --- a build


def planned(config: BuildConfig):
    """The plan of a build, and its rows, without Beam."""
    made = prepare(config, open_storage(config.output))
    for block in made.units.blocks:
        for unit in units_in(made.build.files.output, block):
            index_unit(made.build, unit)
    for _ in range(2):  # a runner may call it again
        plan = make_plan(made.build, made.build.file.num_units)
    found = tables.read_units(made.build.files, range(plan.num_units))
    return plan, [row for table in found for row in tables.rows_of(table)]


@pytest.mark.parametrize("verify", ["decode", "none"])
def test_captions_with_own_keys_of_one_image_are_in_one_split_as_the_plan_counts(tmp_path, verify):
    write_images(tmp_path, [f"{n}.png" for n in range(20)])
    table = write_csv(
        tmp_path / "list.csv",
        ["path", "key", "caption"],
        [[f"{n}.png", f"{n}-{k}", f"dog {k}"] for k in range(5) for n in range(20)],
    )
    config = BuildConfig(
        source="listing",
        input=str(table),
        output=str(tmp_path / "out"),
        label_column="",
        holdout={"test": 0.2},
        verify=verify,
    )
    plan, rows = planned(config)
    splits = {(row.name, row.split) for row in rows}
    assert len(splits) == 20
    assert {split for _, split in splits} == {"train", "test"}
    sizes = {name: split.num_source for name, split in plan.splits.items()}
    assert sizes == {name: sum(row.split == name for row in rows) for name in ("test", "train")}


def test_a_split_that_is_left_empty_and_a_class_that_is_not_in_all_are_noted(tmp_path):
    for name, number in (("a", 1), ("b", 1)):
        for seed in range(number):
            path = tmp_path / f"in/{name}/{seed}.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(image_bytes(ord(name)))
    config = BuildConfig(
        source="folder", input=f"{tmp_path}/in", output=f"{tmp_path}/out", holdout={"test": 1e-9}
    )
    plan, _ = planned(config)
    assert plan.notes == [
        "--holdout test=1e-09 left no image in split test, so there is no such split"
    ]
    (tmp_path / "in/b/1.png").write_bytes(image_bytes(1))
    other = BuildConfig(
        source="folder", input=f"{tmp_path}/in", output=f"{tmp_path}/2", holdout={"test": 1e-9}
    )
    assert planned(other)[0].notes == ["split test has no images of 1 class: a"]
