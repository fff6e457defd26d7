"""The page of the stream benchmark, from measurements made by hand."""

import json

import pytest

from benchmarks import reading, stream
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


ABC_LINES = [
    {
        "kind": "abc",
        "loop": loop,
        "letter": letter,
        "name": stream.ABC[letter],
        "num_samples": 8192,
        "rate": rate + more,
        "rate_after": 1.1 * rate,
        "first_s": 0.5,
        "wait": 0.25,
        "cpu_s": 1.5,
        "servers_s": 0.125,
        **device,
    }
    for loop, device, rates in (
        ("free", {}, {"A": 800, "B": 1000, "C": 700}),
        ("device", {"device_s": 256 / 500}, {"A": 500, "B": 500, "C": 490}),
    )
    for letter, rate in rates.items()
    for more in (-100, 0, 5)
]


def test_far_shards_are_compared_with_local_ones_and_those_with_files_by_either_loop():
    text = stream.abc_table(ABC_LINES)
    assert "| does nothing | C, far shards | 700 | 770 | 0.50 | 25.0% | 1.500 | 0.125 |" in text
    assert "8,192 samples, medians, rounds: 3." in text
    assert (
        "- with a loop that does nothing: B/A is 1.25 from the opening on and 1.25 after the first batch; "
        "C/B is 0.70 from the opening on and 0.70 after the first batch." in text
    )
    assert "- with a device that takes 500 samples/s: B/A is 1.00 from the opening on" in text


def test_a_page_gets_the_table_of_far_shards_without_any_other(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text("<!-- facts -->\nkept\n<!-- end -->\n<!-- abc -->\nbefore\n<!-- end -->\nafter\n")
    results.write_text("".join(json.dumps(line) + "\n" for line in ABC_LINES))
    stream.write(page, results)
    text = page.read_text()
    assert text.startswith("<!-- facts -->\nkept\n<!-- end -->\n<!-- abc -->\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert text.count("| device | B, local shards |") == 1
    assert "before\n" not in text


class Clock:
    """Time that passes in `sleep` alone."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_waiting_is_for_input_and_not_for_the_device_and_leaves_out_the_first_batch(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(reading, "time", clock)

    def reader(data, start):
        for wait_s in (7.0, 1.0, 1.0, 2.0):
            clock.sleep(wait_s)
            yield 100

    found = reading.one({"it": reader}, "it", Data(folder="", kind="png", num_samples=4), device_s=3.0)
    assert (found.first_s, found.num_samples) == (7, 400)
    assert (found.rate, found.rate_after, found.wait) == (400 / 23, 300 / 16, 4 / 16)


@pytest.mark.parametrize(("start", "expected"), [(0, 600), (2, 100)])
def test_an_epoch_is_counted_whole_and_from_the_middle_its_first_batch_only(start, expected):
    def reader(data, begin):
        return iter([300, 200, 100][begin:])

    found = one({"it": reader}, "it", Data(folder="", kind="png", num_samples=600), start=start)
    assert found.num_samples == expected
    assert found.first_s >= 0
