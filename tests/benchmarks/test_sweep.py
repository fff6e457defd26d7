import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import sweep
from tests.makers.training import shard_set


def test_axes_are_read_and_every_combination_is_a_point() -> None:
    assert sweep.points_of(["q=4,8", "shard=gs://a/b,c", "w=0"]) == [
        {"q": q, "shard": shard, "w": 0} for q in (4, 8) for shard in ("gs://a/b", "c")
    ]
    for text in ("thread=1", "q", "q="):
        with pytest.raises(SystemExit, match=f"--axes {text}: expected AXIS=VALUE,VALUE; there are shard, q, w, L"):
            sweep.points_of([text])


def test_a_sweep_writes_a_table_and_a_plot_of_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--axes", f"shard={shard_set(tmp_path / 'set')}", "q=4,8", "threads=1", "batch=4,8", "--rounds", "2"]
    monkeypatch.setattr(
        sys, "argv", ["sweep", *words, "--seconds", "0.01", "--image-size", "8", "--output", str(tmp_path / "out")]
    )
    sweep.main()
    printed = capsys.readouterr()
    said = [line.partition(", q=")[2] or line.partition("q=")[2] for line in printed.err.splitlines()]
    order = [line.split(":")[0] for line in said]
    assert order[:4] == order[:3:-1]  # the second round goes backwards
    rows = [line for line in printed.out.splitlines() if line.startswith("|")]
    assert rows[0].endswith("| q | threads | batch | samples/s | slowest to fastest | CPU s per 1,000 | "
                            "first batch, s | epochs read | at most, MiB |")  # fmt: skip
    assert len(rows) == 2 + 4
    assert "Fastest: shard=" in printed.out
    assert (tmp_path / "out/sweep.md").read_text().startswith(printed.out.rstrip())
    tree = ElementTree.parse(tmp_path / "out/sweep.svg").getroot()
    assert len([one for one in tree.iterfind("{*}rect") if one.get("fill") == "#2b6cb0"]) == 4
