"""The page of the stream benchmark, from measurements made by hand, and the guard that compares two checkouts."""

import json
import sys

import pytest

from benchmarks import environment, stream, stream_page

LINES = [
    {"kind": "jpeg", "name": name, "rate": rate, "cpu_s": 2 + 100 / rate, "first_s": 0.5, "servers_s": 0.125,
     "peak_bytes": 3 << 20}
    for name, rates in (
        ("shardset", (900.0, 1100.0, 1000.0)), ("decoding alone", (1200.0,)), ("webdataset, tuned", (400.0, 500.0)),
    )
    for rate in rates
]  # fmt: skip

ABC_LINES = [
    {"kind": "abc", "loop": loop, "letter": letter, "name": stream.ABC[letter], "num_samples": 8192,
     "rate": rate + more, "rate_after": 1.1 * rate, "first_s": 0.5, "wait": 0.25, "cpu_s": 1.5, "servers_s": 0.125,
     "device_s": 256 / 500}
    for loop, rates in (("free", {"A": 800, "B": 1000, "C": 700}), ("device", {"A": 500, "B": 500, "C": 490}))
    for letter, rate in rates.items()
    for more in (-100, 0, 5)
]  # fmt: skip


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes lines into a page with all marks, and returns it."""
    monkeypatch.setattr(environment, "peers_python", lambda: "python")
    monkeypatch.setattr(environment, "versions", lambda python, names: dict.fromkeys(names, "1"))

    def write(lines):
        page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
        page.write_text("".join(f"<!-- {name} -->\nold\n<!-- end -->\n" for name in ("facts", "jpeg", "abc")))
        results.write_text("".join(json.dumps(line) + "\n" for line in lines))
        stream_page.write(page, results)
        return page.read_text()

    return write


def test_a_page_gets_medians_in_the_order_of_processor_time_between_its_marks_and_keeps_the_rest(written):
    text = written(LINES)
    rows = [line.split(" | ")[:3] for line in text.splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        ["| decoding alone", "1,200", "2.083"],
        ["| shardset", "1,000", "2.100"],
        ["| webdataset, tuned", "450", "2.225"],
    ]
    assert "medians of 1 to 3 runs" in text
    assert text.endswith("<!-- abc -->\nold\n<!-- end -->\n")


def test_far_shards_are_compared_with_local_ones_and_those_with_files_by_either_loop(written):
    text = written(ABC_LINES)
    assert text.startswith("<!-- facts -->\nold\n")
    assert "| does nothing | C, far shards | 700 | 770 | 0.50 | 25.0% | 1.500 | 0.125 |" in text
    assert "8,192 samples, medians, rounds: 3." in text
    assert (
        "- with a loop that does nothing: B/A is 1.25 from the opening on and 1.25 after the first batch; "
        "C/B is 0.70 from the opening on and 0.70 after the first batch." in text
    )
    assert "- with a device that takes 500 samples/s: B/A is 1.00 from the opening on" in text


@pytest.mark.slow
def test_an_epoch_of_a_checkout_is_compared_with_that_of_another(monkeypatch, capsys):
    words = ["--against", str(environment.REPOSITORY), "--kind", "png", "--samples", "64", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["stream", *words])
    stream.main()
    assert "| 64 png images, medians of 1 | seconds | processor time |" in capsys.readouterr().out
