"""Both pages of real runs: what a build and a training leave is shown as it is."""

import pytest

from pipelines.build import build
from pipelines.config import BuildConfig
from pipelines.report import page as set_report
from tests.makers import folders
from tests.makers.training import tiny_config
from trainer import loop
from trainer.runtime.launch import launch
from trainer.tools import report as run_report

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
CLASSES = ("crane", "Crane\N{NO-BREAK SPACE}fly", "鶴\N{IDEOGRAPHIC SPACE}折り紙")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The page of a set that was built from class folders, and that of a run on it."""
    place = tmp_path_factory.mktemp("pages")
    raw = folders.write_class_folders(place / "raw", CLASSES, 8, splits=("train", "val"))
    (raw / "train/crane/broken.png").write_bytes(b"no picture")
    build(
        BuildConfig(
            source="folder",
            input=str(raw),
            output=str(place / "set"),
            num_shards={"": 1},
            max_bad_fraction=0.5,
        ),
        ["--direct_running_mode=in_memory"],
    )
    set_report.write(str(place / "set"))
    launch(tiny_config(str(place / "set"), place / "run", epochs=1), loop.train)
    run_report.write(str(place / "run"))
    return {
        name: (place / name / "report.html").read_text(encoding="utf-8") for name in ("set", "run")
    }


@pytest.mark.parametrize("name", ["set", "run"])
def test_a_page_of_a_real_run_has_no_letter_that_is_not_known(
    pages: dict[str, str], name: str
) -> None:
    assert pages[name].count(UNKNOWN) == 0


def test_the_names_and_percentages_of_real_runs_are_shown_as_they_are(
    pages: dict[str, str],
) -> None:
    assert all(name in pages["set"] for name in CLASSES)
    assert "\N{NO-BREAK SPACE}%</td>" in pages["run"]
