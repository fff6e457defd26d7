"""Raw images, and verbs run in this process, where Beam inspects a step of each kind once: a build
of a few images takes half the time.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from apache_beam.transforms import userstate

from pipelines import cli
from tests.makers.folders import write_class_folders


@pytest.fixture(scope="session", autouse=True)
def quick_beam() -> Iterator[None]:
    inspect, found = userstate.get_dofn_specs, dict[type, Any]()

    def specs(step):
        if type(step) not in found:
            found[type(step)] = inspect(step)
        return found[type(step)]

    with patch.object(userstate, "get_dofn_specs", specs):
        yield


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """The splits train and test of three classes, with 20 small images of each."""
    return write_class_folders(
        tmp_path / "raw", ["cat", "dog", "owl"], 20, splits=["train", "test"]
    )


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a verb, which must end with `code`, and returns what it printed, else its error."""

    def run(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        ended, printed = cli.main([*map(str, words)]), capsys.readouterr()
        assert ended == code, printed.err
        return printed.out or (printed.err if code else "")

    return run
