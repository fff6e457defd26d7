"""Environments on top of the project's: what is below shows through, what is above comes first."""

import subprocess
from pathlib import Path

import pytest

from scripts import venvs


@pytest.mark.nightly
def test_an_environment_on_top_sees_what_is_below_and_is_made_once(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# nothing\n")
    folder = tmp_path / "venv"
    python = venvs.install(folder, requirements, on_top=True)
    words = [str(python), "-c", "import sys, numpy; print(sys.prefix)"]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip() == str(
        folder
    )
    python.rename(folder / "bin" / "moved")
    assert venvs.install(folder, requirements, on_top=True) == python
    assert not python.exists()


def test_other_requirements_make_an_environment_old(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("a>=1\n")
    assert not venvs.is_current(tmp_path, requirements)
    (tmp_path / ".requirements").write_text("a>=1\n")
    assert venvs.is_current(tmp_path, requirements)
    requirements.write_text("a>=2\n")
    assert not venvs.is_current(tmp_path, requirements)
