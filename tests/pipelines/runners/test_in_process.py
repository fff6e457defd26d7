"""Without Beam, a build makes the same files and counts the same."""

import subprocess
import sys

import pytest

from pipelines.build import build, dry_run
from pipelines.runners import in_process
from shardset.errors import TooManyBad
from tests.makers.built import HERE, add, config_of
from tests.makers.images import image_bytes
from tests.makers.stored import files_of


@pytest.fixture
def raw(tmp_path):
    """Two splits of two classes, with copies, a damaged image and one of another format."""
    for number in range(12):
        split, kind = ("train", "val")[number % 3 == 0], "ab"[number % 2]
        add(tmp_path / "raw", f"{split}/{kind}/{number}.png", image_bytes(number % 10))
    add(tmp_path / "raw", "train/a/cut.png", image_bytes(1)[:-20])
    add(tmp_path / "raw", "train/b/named.jpg", image_bytes(2))
    return tmp_path / "raw"


@pytest.mark.parametrize(
    "options", [{}, {"num_shards": {"train": 3, "val": 2}, "verify": "header"}, {"seed": 3}]
)
def test_the_same_files_and_counters_as_by_beam(raw, tmp_path, options):
    options = {"max_bad_fraction": 0.5, **options}
    by_beam, here = (config_of(raw, tmp_path / name, **options) for name in ("beam", "here"))
    expected = build(by_beam, HERE)
    found = build(here)
    assert files_of(here.output) == files_of(by_beam.output)
    assert found.counters == expected.counters
    assert (found.rejected, found.notes) == (expected.rejected, expected.notes)
    again = build(here)
    assert again.counters == build(by_beam, HERE).counters
    assert again.counters["shards_skipped"] > 0
    assert dry_run(here).counters == dry_run(by_beam, HERE).counters


def test_an_error_leaves_nothing_published_and_lets_another_build_follow(raw, tmp_path):
    with pytest.raises(TooManyBad):
        build(config_of(raw, tmp_path / "out", max_bad_fraction=0))
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert build(config_of(raw, tmp_path / "out", max_bad_fraction=0.5)).published


def test_a_small_build_needs_no_beam(raw, tmp_path):
    code = "import sys; from pipelines.cli import main; code = main(sys.argv[1:])"
    code += "; sys.exit(code or 'apache_beam' in sys.modules)"
    words = f"build --source folder --input {raw} --output {tmp_path / 'out'}"
    for more, needs in (([], False), (["--dry-run"], False), (HERE, True)):
        command = [sys.executable, "-c", code, *words.split(), "--max-bad-fraction=0.5"]
        done = subprocess.run([*command, *more], check=False, stdout=subprocess.DEVNULL)
        assert done.returncode == needs


def test_an_input_is_worth_a_worker_for_each_unit_or_16_mebibytes_up_to_the_cores():
    mib = 1 << 20
    sizes = [(1, 0), (1, 16 * mib - 1), (1, 16 * mib), (3, 0), (100, 0)]
    assert [in_process.num_workers(*size, most=8) for size in sizes] == [1, 1, 2, 3, 8]
