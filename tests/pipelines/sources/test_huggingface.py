"""Sources over Parquet files that the real library datasets wrote, and over files like those that
the hub holds.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets.table
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value, disable_progress_bars

from pipelines.sources import huggingface
from pipelines.sources.base import Rejected
from pipelines.sources.huggingface import HuggingFace
from shardset.errors import SourceError
from shardset.storage.open import open_storage
from tests.makers.folders import write_images
from tests.makers.images import image_bytes
from tests.makers.spools import MemorySpool, read

CLASSES = ["cat", "dog", "emu"]
FEATURES = {"image": Image(), "label": ClassLabel(names=CLASSES)}
NUMBER = Value("int64")

disable_progress_bars()


def opened(folder: Path, file: str = "", **options) -> HuggingFace:
    return HuggingFace(open_storage(str(folder)), file, **options)


def row(number: int, **more) -> dict[str, Any]:
    return {
        "image": {"bytes": image_bytes(number), "path": f"{number:03d}.png"},
        "label": number % 3,
        **more,
    }


def write(
    path: Path, rows: list[dict[str, Any]], features: dict[str, Any] | None = None, **options
) -> Path:
    """A file as datasets writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: [each[name] for each in rows] for name in rows[0]}
    Dataset.from_dict(columns, features=Features(features or FEATURES)).to_parquet(path, **options)
    return path


def write_plain(path: Path, rows: list[dict[str, Any]], **options) -> Path:
    """A file without the features of datasets."""
    pq.write_table(pa.Table.from_pylist(rows, **options), path)
    return path


# --- what a row becomes


def test_every_row_of_a_data_set_becomes_a_sample_with_its_bytes_and_the_name_of_its_class(
    tmp_path,
):
    rows = [*map(row, range(10))]
    write(tmp_path / "data/train-00000-of-00002.parquet", rows[:6])
    write(tmp_path / "data/train-00001-of-00002.parquet", rows[6:8])
    write(tmp_path / "data/test-00000-of-00001.parquet", rows[8:])
    source, spool = opened(tmp_path), MemorySpool()
    samples = read(source, spool)
    expected = [("test", 8), ("test", 9), *(("train", number) for number in range(8))]
    assert [(s.split, s.key, s.label) for s in samples] == [
        (split, f"{split}/{number:03d}", number % 3) for split, number in expected
    ]
    assert samples[8].name == "data/train-00001-of-00002.parquet/0/006.png"
    assert [info.name for info in source.survey().classes] == CLASSES
    contents = [spool.content(sample.fields["png"]) for sample in samples[2:]]
    assert contents == [*map(image_bytes, range(8))]
    [took] = source.survey().notes
    assert took.startswith("took the images from column 'image' and the labels from 'label'; ")


def test_the_rows_are_those_that_datasets_itself_reads(tmp_path):
    rows = [row(number, who=f"p{number}") for number in range(7)]
    path = write(tmp_path / "train.parquet", rows, {**FEATURES, "who": Value("string")})
    theirs = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    theirs = theirs.cast_column("image", Image(decode=False))
    source, spool = opened(tmp_path, "train.parquet"), MemorySpool()
    names = [info.name for info in source.survey().classes]
    assert names == theirs.features["label"].names
    for sample, theirs_of_row in zip(read(source, spool), theirs, strict=True):
        content, path = spool.content(sample.fields["png"]), sample.name.rpartition("/")[2]
        assert theirs_of_row == {
            "image": {"bytes": content, "path": path},
            "label": sample.label,
            **json.loads(sample.fields["json"]),
        }


def test_images_without_a_path_get_the_number_of_their_row_in_the_split(tmp_path):
    for number, rows in enumerate([range(3), range(3, 5)]):
        some = [{"image": {"bytes": image_bytes(n), "path": None}, "label": 0} for n in rows]
        write(tmp_path / f"train-{number:05d}-of-00002.parquet", some)
    samples = read(opened(tmp_path))
    assert [sample.key for sample in samples] == [f"train/{number:07d}" for number in range(5)]
    assert [sample.name.partition("/")[2] for sample in samples] == ["0", "1", "2", "0", "1"]
    assert {sample.image for sample in samples} == {"img"}


def test_other_columns_go_into_json_and_bytes_do_not(tmp_path):
    features = {**FEATURES, "mask": Image(), "who": Value("string"), "box": [Value("float32")]}
    mask = {"bytes": image_bytes(9), "path": None}
    write(tmp_path / "train.parquet", [row(1, mask=mask, who="Ada", box=[0.5, 1.0])], features)
    source = opened(tmp_path, image_column="image")
    [sample] = read(source)
    assert sample.fields["json"] == b'{"box":[0.5,1.0],"who":"Ada"}'
    assert "left out the columns mask, which hold bytes" in source.survey().notes


def test_a_row_without_a_label_has_none(tmp_path):
    write(
        tmp_path / "one/train.parquet", [row(0), row(1) | {"label": -1}, row(2) | {"label": None}]
    )
    assert [sample.label for sample in read(opened(tmp_path / "one"))] == [0, -1, -1]
    write(tmp_path / "two/train.parquet", [{"image": row(1)["image"]}], {"image": Image()})
    assert [sample.label for sample in read(opened(tmp_path / "two"))] == [-1]
    assert opened(tmp_path / "two").survey().classes == []


def test_numbers_without_names_and_a_column_of_bare_bytes_will_do(tmp_path):
    rows = [{"img": image_bytes(number), "target": label} for number, label in enumerate([2, 0])]
    source, spool = opened(write_plain(tmp_path / "x.parquet", rows).parent), MemorySpool()
    for number, sample in enumerate(read(source, spool)):
        assert (sample.label, sample.split) == (rows[number]["target"], "train")
        assert spool.content(sample.fields["img"]) == image_bytes(number)
    assert [info.name for info in source.survey().classes] == ["0", "1", "2"]


def test_bad_rows_are_rejected_in_their_place(tmp_path):
    lost = {"image": {"bytes": None, "path": "/x/2.png"}, "label": 1}
    path = write_plain(tmp_path / "train.parquet", [row(0), lost, {"image": None, "label": 0}])
    samples = read(opened(path.parent))
    assert [getattr(sample, "reason", sample.name) for sample in samples] == [
        "train.parquet/0/000.png",
        f"its image has no bytes, only the path /x/2.png; {huggingface._EMBED}",
        "empty",
    ]
    assert [sample.name for sample in samples][2] == "train.parquet/2"


def test_the_advice_on_images_without_bytes_makes_a_file_with_their_bytes(tmp_path):
    write_images(tmp_path, ["0.png", "1.png"])
    files = [str(tmp_path / f"{number}.png") for number in (0, 1)]
    lost = Dataset.from_dict({"image": files, "label": [0, 1]}).cast_column("image", Image())
    lost.to_parquet(tmp_path / "train.parquet")
    assert {type(one) for one in read(opened(tmp_path))} == {Rejected}
    assert ".with_format('arrow').map(datasets.table.embed_table_storage, batched=True)" in (
        huggingface._EMBED
    )
    whole = lost.with_format("arrow").map(datasets.table.embed_table_storage, batched=True)
    whole.to_parquet(tmp_path / "train.parquet")
    spool = MemorySpool()
    found = [spool.content(one.fields["png"]) for one in read(opened(tmp_path), spool)]
    assert found == [Path(file).read_bytes() for file in files]


BYTES = pa.array([image_bytes(number) for number in range(3)])


@pytest.mark.parametrize(
    "images",
    [
        BYTES.cast(pa.binary_view()),
        BYTES.cast(pa.large_binary()),
        BYTES.dictionary_encode(),
        pa.StructArray.from_arrays([BYTES.cast(pa.binary_view())], ["bytes"]),
    ],
    ids=lambda images: str(images.type),
)
@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_images_and_names_of_classes_of_any_type_of_arrow_for_bytes_and_text_are_read(
    tmp_path, images, kind
):
    labels = pa.array(["dog", "cat", None]).cast(kind)
    pq.write_table(pa.table({"image": images, "class": labels}), tmp_path / "x.parquet")
    source, spool = opened(tmp_path), MemorySpool()
    samples = read(source, spool)
    assert [info.name for info in source.survey().classes] == ["cat", "dog"]
    assert [sample.label for sample in samples] == [1, 0, -1]
    found = [spool.content(next(iter(sample.fields.values()))) for sample in samples]
    assert found == BYTES.to_pylist()


# --- files and splits


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (["data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"], {"train"}),
        (
            ["default/train/0000.parquet", "default/partial-validation/0000.parquet"],
            {"train", "validation"},
        ),
        (["train.parquet", "food_test.parquet"], {"train", "test"}),
        (["photos.parquet", "more.parquet"], {"train"}),
        ([".cache/x.parquet", "train.parquet", "README.md"], {"train"}),
    ],
)
def test_the_names_of_files_tell_the_splits(tmp_path, files, splits):
    for file in files:
        write(tmp_path / file, [row(0)])
    assert {sample.split for sample in read(opened(tmp_path))} == splits


def test_a_unit_is_a_run_of_row_groups_and_is_json(tmp_path):
    path = write(tmp_path / "train.parquet", [*map(row, range(25))], batch_size=4)
    assert pq.ParquetFile(path).num_row_groups == 7
    source = opened(tmp_path, rows_per_unit=10)
    units = json.loads(json.dumps(list(source.survey().units)))
    assert [(unit["row_groups"], unit["first_row"], len(unit["labels"])) for unit in units] == [
        ([0, 3], 0, 12),
        ([3, 6], 12, 12),
        ([6, 7], 24, 1),
    ]
    assert len([*source.survey().units]) == 3
    keys = [sample.key for sample in read(source)]
    assert keys == [f"train/{number:03d}" for number in range(25)]


# --- parts


NAMES = [f"train-{number:05d}-of-00004" for number in range(4)]


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        ([NAMES[0], NAMES[1], NAMES[3]], "missing: train-00002-of-00004"),
        (NAMES[:2], "missing: train-00002-of-00004, train-00003-of-00004"),
        ([name.replace("-00000", "-00005") for name in NAMES[:1]], "missing: train-00000"),
        (["part-1-of-3", "part-3-of-3"], "missing: part-00002-of-00003"),
        ([*NAMES, "train-00000-of-00001"], r"5 files train-\*.parquet for 4 parts .missing: none"),
        ([f"{NAMES[0]}-{'a' * 16}", *NAMES], "5 files .* for 4 parts"),
        (["train-00000-of-00002", *(f"train-0000{n}-of-00003" for n in range(3))], "4 files .* 3"),
    ],
)
def test_missing_parts_and_two_exports_are_refused_by_name_unless_they_are_allowed(
    tmp_path, names, listed
):
    for number, name in enumerate(names):
        write(tmp_path / f"{name}.parquet", [row(number)])
    with pytest.raises(SourceError, match=f"{listed}.*--allow-missing-parts"):
        opened(tmp_path).survey()
    assert len(read(opened(tmp_path, allow_missing_parts=True))) == len(names)
    assert len(read(opened(tmp_path, f"{names[0]}.parquet"))) == 1


def test_all_parts_from_0_or_from_1_and_names_that_are_no_parts_are_read(tmp_path):
    stems = [f"{name}-{number:016x}" for number, name in enumerate(NAMES)]
    for number, name in enumerate([*stems, "test-1-of-2", "test-2-of-2", "of-train-2"]):
        write(tmp_path / f"{name}.parquet", [row(number)])
    assert len(read(opened(tmp_path))) == 7


# --- what is refused


def test_a_folder_without_parquet_says_what_is_there(tmp_path):
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"x")
    with pytest.raises(
        SourceError, match=r"no \*\.parquet there; found data-00000-of-00001\.arrow; .*to_parquet"
    ):
        opened(tmp_path).survey()
    with pytest.raises(SourceError, match=r"no x\.parquet there"):
        opened(tmp_path, "x.parquet").survey()


def test_files_of_several_data_sets_or_with_other_classes_are_refused(tmp_path):
    for name, classes in (("one", CLASSES), ("two", ["x", "y", "z"])):
        features = {**FEATURES, "label": ClassLabel(names=classes)}
        for folder in (name, "same"):
            write(tmp_path / folder / f"{name}-00000-of-00001.parquet", [row(0)], features)
    with pytest.raises(
        SourceError, match=r"two-00000-of-00001\.parquet: it has .*names=\('x', 'y', 'z'\)"
    ):
        opened(tmp_path / "same").survey()
    shutil.rmtree(tmp_path / "same")
    with pytest.raises(
        SourceError, match="Parquet files of several data sets, in one, two; name the folder of one"
    ):
        opened(tmp_path).survey()


@pytest.mark.parametrize(
    ("features", "columns", "message"),
    [
        (
            {"text": Value("string"), "label": NUMBER},
            {},
            "none holds images .*--source listing",
        ),
        ({"a": Image(), "b": Image(), "label": NUMBER}, {}, "a, b; choose one by --path-column"),
        (FEATURES, {"image_column": "label"}, "in the columns image, not in label; correct --path"),
        (
            FEATURES,
            {"label_column": "x"},
            "none is called 'x'; correct --label-column",
        ),
        (
            {"image": Image(), "fine": ClassLabel(names=["a"]), "coarse": ClassLabel(names=["b"])},
            {},
            "columns image, fine, coarse; none is called label; .*--label-column",
        ),
        ({"image": Image(), "label": Value("bool")}, {}, "row 0: label False, expected a number"),
    ],
)
def test_columns_that_do_not_tell_are_an_error(tmp_path, features, columns, message):
    values = {"image": row(0)["image"], "a": row(0)["image"], "b": None, "text": "x"}
    write(tmp_path / "train.parquet", [{name: values.get(name, 0) for name in features}], features)
    with pytest.raises(SourceError, match=rf"train\.parquet: .*{message}"):
        opened(tmp_path, **columns).survey()


def test_damage_of_an_image_that_has_a_checksum_is_an_error(tmp_path):
    rows = [*map(row, range(20))]
    path = write(tmp_path / "train.parquet", rows, batch_size=5, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[data.index(image_bytes(7)) + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"not readable as Parquet .*CRC"):
        read(opened(tmp_path))


def test_metadata_that_means_nothing_is_passed_over(tmp_path):
    metadata = {"huggingface": b'{"info": null}'}
    write_plain(tmp_path / "train.parquet", [row(1)], metadata=metadata)
    assert [sample.label for sample in read(opened(tmp_path))] == [1]


# --- memory


def test_a_row_group_of_any_size_is_never_in_memory_as_a_whole(tmp_path):
    random = np.random.default_rng(0)
    rows = [{"image": {"bytes": random.bytes(2**18), "path": None}, "label": 0} for _ in range(128)]
    path = write(tmp_path / "train.parquet", rows)
    assert pq.ParquetFile(path).num_row_groups == 1
    assert path.stat().st_size > 2**25
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool := pa.proxy_memory_pool(before))
    try:
        assert len(read(opened(tmp_path))) == 128
    finally:
        pa.set_memory_pool(before)
    assert 0 < pool.max_memory() < 2**24
