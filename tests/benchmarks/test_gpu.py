"""The benchmark of GPUs: its tables from numbers made by hand, and all of it at a tiny size on the CPU."""

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_case import Timing, repeated
from tests.makers.training import tiny_config
from trainer.data.splits import synthetic_data

PAGE = Path(gpu.__file__).parent.parent / "docs/benchmarks/gpu.md"


def test_a_row_has_the_medians_and_what_a_step_needs() -> None:
    timing = Timing(
        name="resnet50", compile=True, rates={"fake": [2000.0, 2600.0, 2500.0], "real": [2400.0, 100.0, 2450.0]},
        wait_percent=1.25, first_step_s=61.5, peak_mib=20480.4, num_host_waits=0, state_s=0.125,
    )  # fmt: skip
    assert gpu.row(timing) == "| resnet50 | yes | 2,500 | 2,400 | 0.960 | 1.2 % | 61.5 | 20,480 | 0 | 0.12 |"
    assert gpu.HEAD.splitlines()[0].count("|") == gpu.row(timing).count("|")


@pytest.mark.parametrize("num_steps", [3, 13, 26])
def test_steps_continue_over_epochs_that_no_other_turn_has(num_steps: int) -> None:
    stream = synthetic_data(tiny_config(None, "run", fake_data=True), 0, 1, num_samples=80).train
    found = [[(one, step) for one, step, _ in repeated(stream, epoch, num_steps)] for epoch in (0, 1)]
    assert [len(steps) for steps in found] == [num_steps, num_steps]
    assert not set(found[0]) & set(found[1])


@pytest.mark.nightly
def test_all_cases_run_on_a_cpu_at_a_tiny_size(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(PAGE.read_text())
    assert gpu.main(["--scale", "tiny", "--folder", str(tmp_path / "files"), "--write", str(page)]) == 0
    written = page.read_text()
    for model in ("test_resnet", "test_vit", "test_resnet, averages, two passes"):
        for compiled in ("no", "yes"):
            assert f"\n| {model} | {compiled} | " in written
    assert written.count("| none; none |") == 1  # two processes without a GPU have no context on one
    assert "timm, compiled, on the same files: " in capfd.readouterr().out
