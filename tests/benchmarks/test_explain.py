"""The benchmark of explain: every cell of its table is measured, and the page takes it whole."""

import re
from pathlib import Path

import pytest

from benchmarks import explain
from benchmarks.explain import Row
from shardset.order.epoch import Order

PAGE = Path(__file__).parents[2] / "docs" / "explain.md"


def test_a_first_step_and_another_epoch_are_asked_of_epochs_that_are_new(monkeypatch):
    asked: list[tuple[str, int]] = []
    for name in ("batch", "find"):
        real = getattr(Order, name)
        monkeypatch.setattr(
            Order, name, lambda *args, real=real, name=name: asked.append((name, args[1])) or real(*args)
        )
    row = explain.of_order(20_000)
    first, another = asked[: explain.RUNS], asked[explain.RUNS : 2 * explain.RUNS]
    known, new = asked[2 * explain.RUNS : 3 * explain.RUNS], asked[3 * explain.RUNS :]
    assert [epoch for _, epoch in first] == list(range(explain.RUNS))
    assert {*another, *known} == {("batch", explain.RUNS - 1), ("find", explain.RUNS - 1)}
    assert len({epoch for _, epoch in new}) == explain.RUNS
    assert not {epoch for _, epoch in new} & {epoch for _, epoch in first}
    assert row.sample > 0
    assert (row.whole, row.imports) == (None, None)


def test_a_table_has_a_cell_for_every_number_and_none_for_what_was_not_measured():
    lines = explain.table(
        [
            Row(name="a", first=1234.5, step=0.44, sample=9.96, fresh=3),
            Row(name="b", first=1, step=2, sample=3, fresh=4, whole=800.4, imports=700.2),
        ]
    ).splitlines()
    assert lines[-2:] == ["| a | 1,234 | 0.4 | 10.0 | 3.0 |  |  |", "| b | 1.0 | 2.0 | 3.0 | 4.0 | 800 | 700 |"]
    assert {line.count("|") for line in lines[2:]} == {8}


def test_the_page_takes_the_table_and_nothing_else_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    explain.put(page, r"| \1 |" + "\n")
    before, after = PAGE.read_text(), page.read_text()
    assert r"| \1 |" in after
    outside = [re.sub(r"(?s)<!-- table: .*?<!-- end -->", "", text) for text in (before, after)]
    assert outside[0] == outside[1]


@pytest.mark.nightly
def test_the_benchmark_runs_from_raw_digits_to_a_whole_command(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    explain.main(["--samples", "20000", "--write", str(page)], num_runs=2)
    rows = [line for line in page.read_text().splitlines() if line.startswith(("| 20,000", "| the digits"))]
    cells = [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]
    assert [all(row) for row in (cells[0][:4], cells[1][:4], cells[2])] == [True, True, True]
    whole, imports = (float(cell.replace(",", "")) for cell in cells[2][4:])
    assert 0 < imports < 2 * whole
    assert rows[2] in capsys.readouterr().out
