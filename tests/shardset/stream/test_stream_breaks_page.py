"""docs/explanation/breaks.md: its lines do what the page says; the tests that it names exist."""

import re

from tests.conftest import REPOSITORY
from tests.makers.shardset import jpeg_samples, new_set

PAGE = (REPOSITORY / "docs/explanation/breaks.md").read_text(encoding="utf-8")


def test_the_lines_of_the_page_read_every_sample_once(tmp_path, monkeypatch, capsys):
    new_set(jpeg_samples("train", 200, height=24, width=32), str(tmp_path / "shards"))
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == "200 200\n"


def test_the_tests_that_the_page_names_exist():
    named = re.findall(r"tests/[\w/]+\.py", PAGE)
    assert len(named) > 8
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
