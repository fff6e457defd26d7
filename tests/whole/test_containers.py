"""The Dockerfile: versions, files, hadolint; by night its steps in fresh environments, and its
images.
"""

import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.makers.documented import REPOSITORY

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
PROJECT = (REPOSITORY / "pyproject.toml").read_text()
HADOLINT = Path(sys.executable).with_name("hadolint")
STAGES = {
    stage: body
    for stage, body in re.findall(
        r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.S | re.M
    )
}


def instructions(stage: str, kind: str) -> list[str]:
    """What follows each instruction of that kind in a stage."""
    return re.findall(rf"^{kind} (.*)$", STAGES[stage], flags=re.M)


def run(*words: str | Path, cwd: Path = REPOSITORY) -> str:
    done = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def has_daemon() -> bool:
    return (
        shutil.which("docker") is not None
        and not subprocess.run(["docker", "info"], capture_output=True).returncode
    )


def test_every_image_that_it_stands_on_has_a_version():
    images = re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.M)
    outside = [image for image in images if image not in STAGES]
    assert len(outside) == 3
    assert all(re.search(r":[\w.-]*\d[\w.-]*$", image) for image in outside)


def test_beam_and_python_are_those_of_the_project():
    (minor,) = re.findall(r"beam_python3\.11_sdk:2\.(\d+)\.\d+", DOCKERFILE)
    # boot speaks the protocol of the SDK that is installed, which is the newest
    assert re.search(rf'"apache-beam\[gcp\]>=2\.\d+,<2\.{int(minor) + 1}"', PROJECT)
    (python,) = re.findall(r"^FROM python:(\d+\.\d+)\.\d+-slim", DOCKERFILE, flags=re.M)
    assert f'requires-python = ">={python}"' in PROJECT


def test_what_is_copied_exists_and_is_sent_to_the_builder():
    sent = re.findall(r"^!(.*)$", (REPOSITORY / ".dockerignore").read_text(), flags=re.M)
    copied = [name for words in instructions("source", "COPY") for name in words.split()[:-1]]
    assert sorted(copied) == sorted(sent)
    assert all((REPOSITORY / name).exists() for name in copied)


def test_extras_and_users():
    for stage in ("beam", "trainer"):
        (extras,) = instructions(stage, "ARG")
        assert f"\n{extras.removeprefix('EXTRAS=')} = [" in PROJECT
        assert instructions(stage, "USER") == ["1000"]
    assert instructions("dataflow", "USER") == ["0"]
    assert instructions("beam", "ENTRYPOINT") == ['["/opt/apache/beam/boot"]']


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is not installed")
def test_hadolint_finds_nothing():
    run(HADOLINT, "--no-color", "Dockerfile")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "commands"),
    [
        (
            "beam",
            [
                "-m pipelines --version",
                "-m pipelines.template",
                "-c 'import pipelines.build, scipy, jpegio'",
            ],
        ),
        (
            "trainer",
            [
                "-m trainer --version",
                "-m trainer train --help",
                "-c 'import torchvision, timm, cv2'",
            ],
        ),
    ],
)
def test_the_steps_of_a_stage_work_in_a_fresh_environment_with_only_what_is_copied(
    stage, commands, tmp_path
):
    place, home = tmp_path / "source", tmp_path / "environment"
    place.mkdir()
    for words in instructions("source", "COPY"):
        for name in words.split()[:-1]:
            source = REPOSITORY / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, place / name)
    venv.create(home, with_pip=True)
    (extras,) = instructions(stage, "ARG")
    for step in instructions(stage, "RUN"):
        run("bash", "-c", f"PATH={home}/bin:$PATH; {extras}; {step}", cwd=place)
    for command in commands:
        run(home / "bin" / "python", *shlex.split(command), cwd=tmp_path)
    if stage == "beam":
        (step,) = instructions("dataflow", "RUN")
        run("bash", "-c", step, cwd=tmp_path)
        done = subprocess.run(
            [home / "bin" / "python", tmp_path / "main.py"], capture_output=True, text=True
        )
        # it asks for what a launcher would give
        assert (done.returncode, "--source" in done.stderr) == (2, True)


@pytest.mark.nightly
@pytest.mark.skipif(not has_daemon(), reason="no container daemon is running")
@pytest.mark.parametrize(
    ("stage", "command"),
    [
        ("beam", ["--entrypoint=python", "-m pipelines --version"]),
        ("dataflow", ["--entrypoint=python", "main.py --help"]),
        ("trainer", ["--name=shardset-test", "trainer --version"]),
    ],
)
def test_the_image_of_a_stage_is_built_and_runs(stage, command):
    tag = f"shardset-test:{stage}"
    run("docker", "build", "--platform=linux/amd64", f"--target={stage}", f"--tag={tag}", ".")
    flag, words = command
    run("docker", "run", "--rm", "--platform=linux/amd64", flag, tag, *words.split())
    print(run("docker", "image", "inspect", "--format={{.Size}}", tag))
