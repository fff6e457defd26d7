"""The page of the stream benchmark, from measurements made by hand, and the guard that compares two
checkouts.
"""

import json
import sys

import pytest

from benchmarks import environment, stream, stream_page

LINES = [
    {
        "kind": "jpeg",
        "name": name,
        "rate": rate,
        "cpu_s": 2 + 100 / rate,
        "first_s": 0.5,
        "servers_s": 0.125,
        "peak_bytes": 3 << 20,
    }
    for name, rates in (
        ("shardset", (900.0, 1100.0, 1000.0)),
        ("decoding alone", (1200.0,)),
        ("webdataset, tuned", (400.0, 500.0)),
    )
    for rate in rates
]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes lines into a page with all marks, and returns it."""
    monkeypatch.setattr(environment, "peers_python", lambda: "python")
    monkeypatch.setattr(environment, "versions", lambda python, names: dict.fromkeys(names, "1"))

    def write(lines):
        page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
        page.write_text(
            "".join(f"<!-- {name} -->\nold\n<!-- end -->\n" for name in ("facts", "jpeg", "abc"))
        )
        results.write_text("".join(json.dumps(line) + "\n" for line in lines))
        stream_page.write(page, results)
        return page.read_text()

    return write


def test_a_page_gets_medians_in_the_order_of_processor_time_between_its_marks_and_keeps_the_rest(
    written,
):
    text = written(LINES)
    rows = [line.split(" | ")[:3] for line in text.splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        ["| decoding alone", "1,200", "2.083"],
        ["| shardset", "1,000", "2.100"],
        ["| webdataset, tuned", "450", "2.225"],
    ]
    assert "medians of 1 to 3 runs" in text
    assert text.endswith("<!-- abc -->\nold\n<!-- end -->\n")


@pytest.mark.nightly
def test_an_epoch_of_a_checkout_is_compared_with_that_of_another(monkeypatch, capsys):
    words = [
        "--against",
        str(environment.REPOSITORY),
        "--kind",
        "png",
        "--samples",
        "64",
        "--rounds",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["stream", *words])
    stream.main()
    assert "| 64 png images, medians of 1 | seconds | processor time |" in capsys.readouterr().out
