"""The timed way from nothing to a prediction."""

import shutil
import subprocess
import sys

import pytest

from examples.demo import write_digits
from examples.ten_minutes import StepFailed, predict
from tests.makers.documented import REPOSITORY, start
from tests.makers.folders import write_class_folders


def ten_minutes(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.ten_minutes", "--skip-install", *words]
    return start(command, REPOSITORY)


@pytest.mark.nightly
def test_nested_folders_of_digits_become_a_prediction_and_a_table_of_seconds(tmp_path):
    for path in sorted(write_digits(tmp_path / "all").rglob("*.png"))[::9]:
        nested = tmp_path / "digits" / path.parent.name / f"part-{int(path.stem) % 2}"
        nested.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, nested)
    done = ten_minutes(
        "--folder", str(tmp_path / "new"), "--pictures", str(tmp_path / "digits"), "--epochs", "2"
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" s")]
    assert rows[-4:] == ["build", "train", "predict", "all"]
    for number in range(3):
        assert f"digit-{number}/part-0/" in done.stdout


@pytest.mark.slow
def test_a_step_that_fails_is_named_with_its_exit_code_after_its_own_message(tmp_path):
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    done = ten_minutes("--folder", str(tmp_path / "new"), "--pictures", str(tmp_path / "empty"))
    assert done.returncode == 1
    assert (
        "step 'build' failed with exit code 1; its own message is above"
        in done.stderr.splitlines()[-1]
    )
    assert "train --manifest" not in done.stdout


def test_a_folder_that_holds_an_earlier_run_is_refused(tmp_path):
    (tmp_path / "old").write_text("")
    done = ten_minutes("--folder", str(tmp_path))
    assert (done.returncode, "is not empty" in done.stderr) == (2, True)


def test_a_picture_of_each_of_the_first_classes_is_predicted(tmp_path):
    write_class_folders(tmp_path, ["a/deep", "b", "c", "d"], 2)
    images = predict("python", tmp_path, tmp_path).command[-3:]
    assert images == [str(tmp_path / name / "000.png") for name in ("a/deep", "b", "c")]


def test_pictures_without_class_folders_are_named(tmp_path):
    with pytest.raises(StepFailed, match=r"expected CLASS/\.\.\./picture\.png"):
        predict("python", tmp_path, tmp_path)
