"""The notebooks in examples/: small files without outputs, whose cells all run,
without a network.
"""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.makers.documented import REPOSITORY, SCRIPTS

NOTEBOOKS = sorted((REPOSITORY / "examples").glob("*.ipynb"))


@pytest.fixture
def printed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What each code cell of a notebook prints; fails at the first cell that fails."""
    for name, value in {
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": str(tmp_path),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(REPOSITORY / f"examples/{request.param}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    return [
        "".join(
            output.get("text", "") or output.get("data", {}).get("text/plain", "")
            for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 10_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count]


@pytest.mark.nightly
@pytest.mark.parametrize("printed", ["own_pictures"], indirect=True)
def test_own_pictures_end_in_a_prediction_of_each_image(printed):
    assert "(32, 64, 64, 3)" in printed[2]
    assert [line.split(":")[0] for line in printed[-1].splitlines() if "%" in line] == [
        "pictures/digit-3/0003.png", "pictures/digit-7/0007.png",
    ]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("printed", ["fine_tune"], indirect=True)
def test_fine_tuning_beats_random_weights(printed):
    accuracies = eval(printed[-2])
    assert accuracies["tuned"] > accuracies["scratch"]
    assert printed[-1].count("few/digit-7/") == 2


@pytest.mark.nightly
@pytest.mark.parametrize("printed", ["inspect_a_set"], indirect=True)
def test_a_set_shows_its_bad_input_and_its_damage(printed):
    assert "quarantined: 1" in printed[2]
    assert "broken.png" in printed[2].splitlines()[-1]
    assert "train 1412 samples in 4 shards" in printed[3]
    assert printed[6].startswith("DamagedShard: ")
    assert "exit code 1" in printed[7]


@pytest.mark.nightly
@pytest.mark.parametrize("printed", ["detection"], indirect=True)
def test_a_detector_learns(printed):
    precisions = [float(line.split()[-1]) for line in printed[-1].splitlines()]
    assert len(precisions) == 12
    assert max(precisions[-4:]) > 0.3
    assert max(precisions[-4:]) > precisions[0]
