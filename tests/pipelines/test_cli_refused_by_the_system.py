"""A disk that is full and files that may not be read or written: one sentence, an exit code,
nothing half-written.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines.check.verify import verify
from shardset.format import naming
from tests.makers.folders import write_class_folders
from tests.makers.stored import files_of

UNPRIVILEGED = [
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search",
    "--inh-caps=-dac_override,-dac_read_search",
]
"""Before a command: takes from root what lets it read and write whatever the permissions say."""


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "raw", ["cat", "dog"], 30, splits=["train"])


@pytest.fixture
def closed() -> Iterator[Callable[[Path, int], None]]:
    """Changes the mode of files and folders until the test has ended."""
    changed: list[tuple[Path, int]] = []

    def close(path: Path, mode: int) -> None:
        changed.append((path, path.stat().st_mode))
        path.chmod(mode)

    yield close
    for path, mode in changed:
        path.chmod(mode)


def run(
    raw: Path,
    output: Path,
    *,
    before: tuple[str, ...] = (),
    limit: int = resource.RLIM_INFINITY,
):
    """A build in one process, which may not write a file larger than `limit`."""
    words = ["build", "--source=folder", f"--input={raw}", f"--output={output}", "--num-shards=2"]
    mode = "--direct_running_mode=in_memory"
    command = [*before, sys.executable, "-m", "pipelines", *words, mode]

    def lower() -> None:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )

    return subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=lower)


def run_unprivileged(raw: Path, output: Path):
    return run(raw, output, before=tuple(UNPRIVILEGED) if os.geteuid() == 0 else ())


def check_refusal(done: subprocess.CompletedProcess[str], *sentences: str) -> None:
    assert done.returncode == 1
    assert all(sentence in done.stderr for sentence in sentences), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_disk_without_room_fails_the_build_and_with_more_room_a_rerun_completes_it(raw, tmp_path):
    out = tmp_path / "out"
    done = run(raw, out, limit=24 << 10)
    check_refusal(done, f"StorageError: {out}/", "larger than the system allows")
    assert not (out / naming.MANIFEST).exists()
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]
    assert run(raw, out).returncode == 0
    assert verify(str(out), deep=True).problems == ()
    assert run(raw, tmp_path / "undisturbed").returncode == 0
    assert files_of(out) == files_of(tmp_path / "undisturbed")


@pytest.mark.slow
def test_an_output_where_nothing_may_be_written_is_said_and_left_alone(raw, tmp_path, closed):
    (tmp_path / "readonly").mkdir()
    closed(tmp_path / "readonly", 0o555)
    check_refusal(
        run_unprivileged(raw, tmp_path / "readonly" / "out"),
        f"{tmp_path}/readonly/out/",
        "no permission",
    )
    assert list((tmp_path / "readonly").iterdir()) == []


@pytest.mark.slow
def test_an_input_folder_that_may_not_be_read_is_said_and_nothing_is_written(raw, tmp_path, closed):
    closed(raw / "train" / "dog", 0)
    check_refusal(run_unprivileged(raw, tmp_path / "out"), f"{raw}/train/dog: no permission")
    assert not (tmp_path / "out").exists()
