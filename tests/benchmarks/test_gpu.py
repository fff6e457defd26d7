"""The benchmark of GPUs: all of it at a tiny size on the CPU."""

from pathlib import Path

import pytest

from benchmarks import gpu

PAGE = Path(gpu.__file__).parent.parent / "docs/dev/benchmarks/gpu.md"


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
