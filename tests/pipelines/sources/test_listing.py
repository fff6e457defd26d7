import datetime
import json
from dataclasses import replace

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config import BuildConfig
from pipelines.sources import open_source
from pipelines.sources.base import Extent, RawSample, Rejected
from pipelines.sources.formats.record_table import MAX_CELL_CHARS
from pipelines.sources.listing import Listing
from shardset.errors import ConfigError, SourceError
from shardset.storage.open import open_file, open_storage
from tests.makers.folders import write_csv, write_images, write_jsonl
from tests.makers.spools import contents, read


def opened(path, **options) -> Listing:
    return Listing(*open_file(str(path)), **options)


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path, ["a/1.png", "a/2.jpg", "3.ppm"])


def csv_of(folder, *rows, columns=("path", "label")):
    return opened(write_csv(folder / "list.csv", columns, rows))


def jsonl_of(folder, *rows):
    return opened(write_jsonl(folder / "list.jsonl", rows))


# --- what a row becomes


def test_a_csv_row_becomes_a_pinned_sample(images):
    [sample] = read(csv_of(images, ["a/1.png", "cat"]))
    stat = open_storage(str(images)).stat("a/1.png")
    assert sample == RawSample(
        name="a/1.png",
        key="a/1",
        split="train",
        label=0,
        image="png",
        fields={"png": Extent("a/1.png", stat.generation, 0, stat.num_bytes)},
    )


def labelled(folder, kind, paths, labels):
    rows = zip(paths, labels, strict=True)
    if kind == "csv":
        return csv_of(folder, *rows)
    return jsonl_of(folder, *({"path": path, "label": label} for path, label in rows))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_numbers_are_labels_as_they_are_and_name_the_classes(images, kind):
    source = labelled(images, kind, ["3.ppm", "a/1.png"], [2, 0])
    survey = source.survey()
    assert [sample.label for sample in read(source)] == [2, 0]
    assert [(info.label, info.name) for info in survey.classes] == [(0, "0"), (1, "1"), (2, "2")]


@pytest.mark.parametrize(
    ("name", "delimiter"),
    [
        ("list.csv", ","),
        ("list.csv", ";"),
        ("list.csv", "\t"),
        ("list.tsv", ","),
        ("list.tsv", "\t"),
    ],
)
def test_a_listing_may_be_as_spreadsheets_and_windows_write_it(images, name, delimiter):
    rows = [
        ["path", " label", "note"],
        [],
        ['"a/1.png"', '"a ""cat""; or, dog"', '"1,5"'],
        ["3.ppm", " ant ", '"two\r\nlines"'],
    ]
    text = "\ufeff" + "".join(delimiter.join(row) + "\r\n" for row in rows)
    (images / name).write_bytes(text.encode())
    source = opened(images / name)
    assert [info.name for info in source.survey().classes] == ['a "cat"; or, dog', "ant"]
    assert [(sample.name, sample.fields["json"]) for sample in read(source)] == [
        ("a/1.png", b'{"note":"1,5"}'),
        ("3.ppm", b'{"note":"two\\r\\nlines"}'),
    ]


def test_other_columns_go_into_json_sorted_and_compact_and_every_sample_has_the_field_if_one_has(
    images,
):
    source = csv_of(images, ["é", "a/1.png", "cat", "7"], columns=["z", "path", "label", "age"])
    assert read(source)[0].fields["json"] == '{"age":"7","z":"é"}'.encode()
    extra = {"b": {"y": [1, None], "x": 1.5}, "a": True}
    rows = [{"path": "3.ppm", "label": 0, **extra}, {"path": "a/1.png", "label": 0}]
    assert [sample.fields["json"] for sample in read(jsonl_of(images, *rows))] == [
        b'{"a":true,"b":{"x":1.5,"y":[1,null]}}',
        b"{}",
    ]


def test_paths_are_made_plain_and_may_lack_a_known_extension(images):
    (images / "photo").symlink_to("a/2.jpg")
    paths = ["./a//1.png", "photo", "./a/../b/../a/1.png"]
    plain = [("a/1.png", "a/1", "png"), ("photo", "photo", "img"), ("a/1.png", "a/1", "png")]
    samples = read(csv_of(images, *([path, 0] for path in paths)))
    assert [(sample.name, sample.key, sample.image) for sample in samples] == plain


def test_a_name_in_another_unicode_form_is_named_as_such(tmp_path):
    composed, apart = "\u00e9.png", "e\u0301.png"
    write_images(tmp_path, [apart, "1.png"])
    message = r"none of its 1 images .* not found in the Unicode form that is listed, but in NFD"
    with pytest.raises(SourceError, match=message):
        csv_of(tmp_path, [composed, "cat"]).survey()
    _, rejected = read(csv_of(tmp_path, ["1.png", "cat"], [composed, "cat"]))
    assert rejected.reason.endswith(
        "but in NFD (as macOS writes accents); list it by unicodedata.normalize('NFD', path)"
    )


@pytest.mark.parametrize("make", ["csv", "jsonl", "parquet"])
def test_a_whole_number_is_a_label_as_text_or_float_and_an_empty_cell_is_none(images, make):
    labels = [10.0, None, 2.0] if make == "parquet" else ["\t10 ", "", " 2.00"]
    if make == "parquet":
        source = parquet_of(images, {"path": ["3.ppm"] * 3, "label": labels})
    else:
        source = labelled(images, make, ["3.ppm"] * 3, labels)
    assert [sample.label for sample in read(source)] == [10, -1, 2]
    assert source.survey().looked_for == "numbers and names in column 'label'"


def test_a_cell_may_be_as_long_as_a_line(images):
    [sample] = read(
        csv_of(images, ["3.ppm", "cat", "1 " * 100_000], columns=["path", "label", "rle"])
    )
    assert len(sample.fields["json"]) > 200_000


def test_an_image_may_be_elsewhere_by_its_path_or_url(images, tmp_path_factory):
    storage = open_storage("memory://listing-test/folder")
    storage.write("x.png", b"1234")
    folder, url = tmp_path_factory.mktemp("elsewhere"), "memory://listing-test/folder/x.png"
    rows = [[f"{images}/a/1.png", "cat"], [url, "cat"]]
    near, far = read(opened(write_csv(folder / "list.csv", ["path", "label"], rows)))
    assert (near.name, near.key) == (f"{images}/a/1.png", f"{images}/a/1".lstrip("/"))
    assert near.fields["png"].num_bytes == (images / "a/1.png").stat().st_size
    assert far.fields["png"] == Extent(url, storage.stat("x.png").generation, 0, 4)
    assert far.key == "listing-test/folder/x"


def test_units_are_pieces_of_the_listing_and_an_image_that_is_not_there_is_rejected_in_its_place(
    images,
):
    rows = [["a/1.png", "cat"], ["gone.png", "dog"], ["3.ppm", "cat"]]
    source = replace(csv_of(images, *rows), entries_per_unit=2)
    assert source.survey().objects == {"list.csv": (images / "list.csv").stat().st_size}
    assert [len(unit["entries"]) for unit in source.survey().units] == [2, 1]
    first, second, third = read(source)
    assert second == Rejected(name="gone.png", split="train", reason="not found")
    assert [first.name, third.name] == ["a/1.png", "3.ppm"]


@pytest.mark.parametrize("field", ["mask.png", "ppm"])
def test_further_columns_name_files_that_are_stored_beside_the_image(images, field):
    rows = [["3.ppm", "a/1.png", "x"], ["a/2.jpg", "gone.png", "y"]]
    path = write_csv(images / "list.csv", ["path", "mask", "label"], rows)
    source = opened(path, files={field: "mask"})
    if field == "ppm":
        with pytest.raises(SourceError, match="has 'ppm' already"):
            read(source)
        return
    sample, rejected = read(source)
    assert contents(source, sample) == {
        "ppm": (images / "3.ppm").read_bytes(),
        field: (images / "a/1.png").read_bytes(),
    }
    assert rejected.reason == "its mask.png: not found"


# --- columns


@pytest.mark.parametrize(
    ("columns", "path", "label"),
    [
        (["image", "class"], "image", "class"),
        (["Filename", "Category"], "Filename", "Category"),
        (["file", "image", "class", "label"], "image", "label"),
        (["kind", "path", "label", "image"], "path", "label"),
    ],
)
def test_columns_with_usual_names_are_taken_and_named(images, columns, path, label):
    row = dict.fromkeys(columns, "other") | {path: "3.ppm", label: "cat"}
    source = csv_of(images, row.values(), columns=columns)
    [sample] = read(source)
    assert (sample.name, source.survey().classes[0].name) == ("3.ppm", "cat")
    del row[path], row[label]
    assert json.loads(sample.fields.get("json", b"{}")) == row
    took = f"took the images from column {path!r} and the labels from {label!r}"
    told = [f"{took}; --path-column and --label-column name others"]
    assert source.survey().notes == ([] if (path, label) == ("path", "label") else told)


def test_any_columns_can_be_named(images):
    rows = [["a/1.png", "bird", "x.png"], ["3.ppm", "fish", "y.png"]]
    listing = write_csv(images / "list.csv", ["where", "kind", "path"], rows)
    source = opened(listing, path_column="where", label_column="kind")
    assert [(s.name, s.label, s.fields["json"]) for s in read(source)] == [
        ("a/1.png", 0, b'{"path":"x.png"}'),
        ("3.ppm", 1, b'{"path":"y.png"}'),
    ]


def test_a_listing_of_paths_alone_and_one_with_an_empty_label_column_have_no_labels(images):
    listing = write_csv(images / "list.csv", ["path", "label"], [["3.ppm", "cat"]])
    [sample] = read(opened(listing, label_column=""))
    assert (sample.label, sample.fields["json"]) == (-1, b'{"label":"cat"}')
    half = jsonl_of(images, {"path": "3.ppm"}, {"path": "a/1.png", "label": 1})
    with pytest.raises(SourceError, match="line 2: a label, but line 1 has none; give all rows"):
        half.survey()
    (images / "list.NDJSON").write_text('\n{"image": "3.ppm"}\n\n')
    for source in (csv_of(images, ["3.ppm"], columns=["path"]), opened(images / "list.NDJSON")):
        [sample] = read(source)
        assert (sample.label, list(sample.fields)) == (-1, ["ppm"])
        assert source.survey().classes == []
        assert "and no labels" in source.survey().notes[0]


# --- Parquet


def parquet_of(folder, columns: dict, **options) -> Listing:
    pq.write_table(pa.table(columns), folder / "list.parquet", **options)
    return opened(folder / "list.parquet")


def test_csv_jsonl_and_parquet_say_the_same(images):
    columns = {
        "path": ["a/1.png", "a/2.jpg", "3.ppm"],
        "label": ["dog", "cat", "dog"],
        "split": ["test", None, "train"],
        "key": ["k1", None, "k3"],
        "age": [7, None, 9],
        "size": [1.5, 2.0, 0.25],
    }
    rows = pa.table(columns).to_pylist()
    expected = read(jsonl_of(images, *rows))
    assert [(s.split, s.key, s.label, s.image) for s in expected] == [
        ("test", "k1", 1, "png"),
        ("train", "a/2", 0, "jpg"),
        ("train", "k3", 1, "ppm"),
    ]
    assert read(parquet_of(images, columns, row_group_size=2)) == expected
    frame = pandas.DataFrame(rows).astype({"label": "category", "age": "Int64"})
    frame.to_parquet(images / "list.parquet")
    assert read(opened(images / "list.parquet")) == expected


def test_numbers_in_parquet_are_labels_and_other_values_are_written_as_json_has_them(images):
    row = {"image": "3.ppm", "target": 3, "day": datetime.date(2024, 5, 17)}
    row |= {"ratio": float("nan"), "tags": ["a"], "box": {"x": 1}}
    [sample] = read(parquet_of(images, {name: [value] for name, value in row.items()}))
    assert sample.label == 3
    assert sample.fields["json"] == b'{"box":{"x":1},"day":"2024-05-17","ratio":null,"tags":["a"]}'


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"path": ["3.ppm"] * 2, "label": [1.0, 1.5]},
            "row 2: label 1.5, expected a number from 0",
        ),
        ({"path": ["3.ppm"], "raw": [b"1"]}, "column raw holds bytes; read images .* --source hf"),
        ({"path": [{"bytes": b"1", "path": "x"}], "label": [1]}, "column path holds bytes"),
        ({"where": ["3.ppm"]}, "the schema: columns where; expected"),
    ],
)
def test_a_malformed_parquet_listing_is_an_error_with_its_row(images, columns, message):
    with pytest.raises(SourceError, match=rf"list\.parquet: {message}"):
        parquet_of(images, columns).survey()


# --- options


@pytest.mark.parametrize(
    ("source", "option", "takers"),
    [
        ("listing", {"class_depth": 2}, "folder"),
        ("imagenet", {"path_column": "x"}, "hf and listing"),
    ],
)
def test_an_option_of_other_sources_is_refused(tmp_path, source, option, takers):
    config = BuildConfig(source=source, input=str(tmp_path), output="out", **option)
    with pytest.raises(
        ConfigError, match=f"--[a-z-]+ has no meaning for {source}, only for {takers}; leave it out"
    ):
        open_source(config)


# --- quotes

BETWEEN = [[f"{number}.png", "a photo"] for number in range(3)]


@pytest.mark.parametrize("mark", ["\t", ";", ","])
@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([["a.png", '"The thinker'], *BETWEEN, ["b.jpg", '42"']], "2 to 6 .* 5 rows"),
        ([*BETWEEN, ["a.png", '"Untitled'], ["b.jpg", 'oil, 20 x 30"']], "5 to 6 .* 2 rows"),
    ],
)
@pytest.mark.parametrize("turn", [1, -1])
def test_rows_that_become_one_by_their_quotes_are_refused_with_their_lines(
    tmp_path, rows, lines, mark, turn
):
    rows = [[cell.replace(",", " ") for cell in row] for row in rows]
    text = [mark.join(row[::turn]) for row in [["path", "caption"], *rows]]
    (tmp_path / "x.csv").write_text("\n".join(text))
    with pytest.raises(SourceError, match=f"x.csv: lines {lines} without; save .* JSONL"):
        opened(tmp_path / "x.csv", label_column="").listed()


@pytest.mark.parametrize("mark", ["\t", ";", ","])
def test_quoted_cells_with_line_breaks_quotes_and_delimiters_are_texts(images, mark):
    texts = ["two\nlines", 'a "word",\r\nand; more', f"one{mark}\ntwo{mark}", "\n\n", "x\na, b.c"]
    table = pandas.DataFrame({"path": "3.ppm", "caption": texts})
    table.to_csv(images / "x.tsv", sep=mark, index=False, lineterminator="\r\n")
    found = read(opened(images / "x.tsv", label_column=""))
    assert [json.loads(one.fields["json"])["caption"] for one in found] == texts


# --- malformed listings


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"path": "", "label": 1}, "path '', expected a file's"),
        ({"path": "../x.png", "label": 1}, "path '../x.png' climbs out of the input's folder"),
        ({"path": "a/../../x.png", "label": 1}, "path 'a/../../x.png' climbs out"),
        ({"path": "a\0b", "label": 1}, "path"),
        ({"path": 3, "label": 1}, "path is 3, expected a text"),
        ({"path": "ftp://x/y.png", "label": 1}, ".*ftp.* is not known"),
        ({"path": "x.png", "label": True}, "label True"),
        ({"path": "x.png", "label": -2}, "label -2, expected a number from 0 to 1000000"),
        ({"path": "x.png", "label": 1, "key": 5}, "key is 5, expected a text"),
        (["x.png", 1], "not a JSON object with path and label"),
        (b"{", "not a JSON object"),
        (b'{"path": "a", "label": NaN}', "not a JSON object"),
        (b'{"path": "\\ud800", "label": 1}', "not a JSON object"),
        (b'{"path": "\xff", "label": 1}', "not a JSON object .*Invalid UTF-8"),
    ],
)
def test_a_malformed_jsonl_row_is_an_error_with_its_line(images, row, message):
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    (images / "list.jsonl").write_bytes(b'{"path": "3.ppm", "label": 0}\n' + line)
    with pytest.raises(SourceError, match=rf"list\.jsonl: line 2:? {message}"):
        opened(images / "list.jsonl").survey()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\nx.png\n", "line 2: 1 cells, expected 2"),
        ("path;label\n3.ppm;cat;dog\n", "line 2: 3 cells, .* does a cell with ';'"),
        (f"path,label\n3.ppm,{'9' * 5000}\n", "line 2: label 9999"),
        ('path,label\n"a"x,1\n', "line 2: not CSV"),
        ("path,kind\n3.ppm,1\n", "line 1: columns path, kind; none is .* --label-column"),
        ("where,label\n3.ppm,1\n", "line 1: columns where, label; expected a header with path"),
        ("path,label,label\n3.ppm,1,1\n", "line 1: columns path, label, label"),
        ("", r"line 1: columns \(none\)"),
        (",path,label\n0,3.ppm,1\n", "line 1: columns , path, label; .*pandas .*index=False"),
        (f'path,label\n"{"x" * MAX_CELL_CHARS}\ny",1\n', "line 2.* columns of long texts"),
        ("path,label\n", "no rows, expected one for each image"),
        (
            "path,label\n3.ppm,1\n3.ppm,cat\n3.ppm,2\n3.ppm,dog",
            "label 1 in line 2 is a number and 'cat' in line 3 a name",
        ),
    ],
)
def test_a_malformed_csv_is_an_error_with_its_line(images, text, message):
    (images / "list.csv").write_text(text)
    with pytest.raises(SourceError, match=rf"list\.csv: {message}"):
        opened(images / "list.csv").survey()


def test_a_listing_that_is_not_there_or_of_another_kind_is_an_error(tmp_path):
    with pytest.raises(SourceError, match=r"list\.csv: not there, expected a \.csv"):
        opened(tmp_path / "list.csv").survey()
    with pytest.raises(
        ConfigError, match=r"list\.xlsx: expected a listing that ends with \.csv, \.jsonl"
    ):
        opened(tmp_path / "list.xlsx")


@pytest.mark.parametrize("path", ["other/1.png", "/elsewhere/1.png"])
def test_a_listing_whose_images_are_all_missing_says_what_was_looked_for_and_what_is_there(
    tmp_path, path
):
    write_images(tmp_path, ["sub/1.png"])
    write_csv(tmp_path / "list.csv", ["path", "label"], [[path, "cat"]] * 2)
    with pytest.raises(SourceError) as caught:
        Listing(open_storage(str(tmp_path)), "list.csv").survey()
    tried = path if path.startswith("/") else f"{tmp_path}/{path}"
    said = (
        f"none of its 2 images is there, the first not as {tried}; found list.csv, sub/1.png; a"
        " path is relative to"
    )
    assert said in str(caught.value)
