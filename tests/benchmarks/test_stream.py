"""The page of the stream benchmark, from measurements made by hand."""

import json

import pytest

from benchmarks import stream
from benchmarks.reading import Data, one

LINES = [
    {
        "kind": "jpeg",
        "name": name,
        "rate": rate,
        "cpu_s": 2.0 + 100 / rate,
        "first_s": 0.5,
        "peak_bytes": 3 << 20,
        **more,
    }
    for name, rates, more in (
        ("shardset", (900.0, 1100.0, 1000.0), {"resume_s": 0.25}),
        ("decoding alone, both cores", (1200.0,), {}),
        ("webdataset, tuned", (400.0, 500.0), {}),
    )
    for rate in rates
]


def test_medians_stand_in_the_order_of_their_processor_time():
    found = stream.summary(LINES)
    assert list(found) == ["decoding alone, both cores", "shardset", "webdataset, tuned"]
    assert (found["shardset"]["rate"], found["webdataset, tuned"]["rate"]) == (1000, 450)


def test_a_table_leaves_empty_what_nobody_measured():
    lines = stream.table(stream.summary(LINES)).splitlines()
    assert "| shardset | 1,000 | 2.100 | 0.50 | 0.25 | 3 |" in lines
    assert "| webdataset, tuned | 450 | 2.225 | 0.50 |  | 3 |" in lines


def test_the_page_gets_its_tables_between_the_marks_and_keeps_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(stream.environment, "peers_python", lambda: "python")
    monkeypatch.setattr(stream.environment, "versions", lambda python, names: dict.fromkeys(names, "1"))
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text("# T\n<!-- facts -->\nold\n<!-- end -->\n<!-- jpeg -->\nold\n<!-- end -->\nafter\n")
    results.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    stream.write(page, results)
    stream.write(page, results)
    text = page.read_text()
    assert text.count("| shardset |") == 1
    assert "old" not in text
    assert text.endswith("<!-- end -->\nafter\n")
    assert page.with_suffix(".svg").read_text().count("<rect") == 4


@pytest.mark.parametrize(("start", "expected"), [(0, 600), (2, 100)])
def test_an_epoch_is_counted_whole_and_from_the_middle_its_first_batch_only(start, expected):
    def reader(data, begin):
        return iter([300, 200, 100][begin:])

    found = one({"it": reader}, "it", Data(folder="", kind="png", num_samples=600), start=start)
    assert found.num_samples == expected
    assert found.first_s >= 0
