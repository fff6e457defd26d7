import os
from pathlib import Path

import pytest

from trainer.runtime.xla import CACHE, use_cache


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that the test may change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(CACHE, "unset")


def test_each_process_has_a_folder_of_its_own(tmp_path: Path) -> None:
    use_cache(3)
    assert os.environ[CACHE] == str(tmp_path / "home/shardset/xla/process-003")
    assert Path(os.environ[CACHE]).is_dir()


def test_a_folder_that_can_not_be_written_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").touch()
    use_cache(0)
    assert os.environ[CACHE] == "unset"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: compile cache: ")
    assert f"{tmp_path}/home" in warning
