"""The benchmark of GPUs: all of it at a tiny size on the CPU."""

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_case import repeated
from tests.makers.training import tiny_config
from trainer.data.splits import synthetic_data

PAGE = Path(gpu.__file__).parent.parent / "docs/benchmarks/gpu.md"


def test_steps_continue_over_epochs_that_no_other_turn_has() -> None:
    num_steps = 13
    stream = synthetic_data(tiny_config(None, "run", fake_data=True), 0, 1, num_samples=80).train
    found = [
        [(one, step) for one, step, _ in repeated(stream, epoch, num_steps)] for epoch in (0, 1)
    ]
    assert [len(steps) for steps in found] == [num_steps, num_steps]
    assert not set(found[0]) & set(found[1])


@pytest.mark.nightly
def test_all_cases_run_on_a_cpu_at_a_tiny_size(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(PAGE.read_text())
    assert (
        gpu.main(["--scale", "tiny", "--folder", str(tmp_path / "files"), "--write", str(page)])
        == 0
    )
    written = page.read_text()
    all_modes = ("test_resnet", "test_vit", "test_vit, small batch")
    for model, modes in (
        *((one, gpu.MODES) for one in all_modes),
        ("test_resnet, averages, two passes", ("default",)),
    ):
        for mode in ("no", *modes):
            assert f"\n| {model} | {mode} | " in written
    # two processes without a GPU have no context on one
    assert written.count("| none; none |") == 1
    assert "timm, compiled, on the same files: " in capfd.readouterr().out
