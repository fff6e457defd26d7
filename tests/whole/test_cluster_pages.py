"""The commands of the pages about Dataflow, Flink, Spark and stopped builds: flags are known,
targets are there.
"""

import re
import shlex
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.runners import beam_options
from scripts import flink, job_server, spark
from shardset.format import naming
from tests.makers.documented import REPOSITORY, commands_of, run, write_inputs

CLUSTERS = commands_of("docs/how-to/clusters.md")
PAGES = ["docs/how-to/clusters.md", "docs/dev/builds.md"]


def words_after_build(command: str) -> list[str]:
    """The words of a build, from its verb on."""
    words = shlex.split(command)
    return words[words.index("build") :]


def of_make(command: str, place: Path) -> str:
    """What `make` would run."""
    return run(
        [*shlex.split(command), "--dry-run", "--directory", str(REPOSITORY), "--old-file=env"],
        place,
    )


def built(command: str, place: Path) -> list[str]:
    """The words of the build that a command of the page about Dataflow starts, by `make` or not."""
    if not command.startswith("make "):
        return words_after_build(command)
    lines = of_make(command, place).replace("\\\n", " ").splitlines()
    (build,) = [line for line in lines if "-m pipelines build" in line]
    return words_after_build(build)


DATAFLOW = [line for line in CLUSTERS if "dataflow" in line]


@pytest.mark.parametrize(
    "command",
    DATAFLOW
    + [
        line
        for line in commands_of("docs/tutorials/imagenet-in-the-cloud.md")
        if line[:5] == "make "
    ],
)
def test_a_command_for_dataflow_is_taken_up_to_its_output(command, tmp_path, capsys):
    words = built(command, tmp_path)
    # which no worker could reach: all other checks come before
    words[words.index("--output") + 1] = str(tmp_path)
    assert main(words) == 2
    assert f"--output {tmp_path}: expected gs://BUCKET/FOLDER" in capsys.readouterr().err


def test_the_target_spells_the_command_of_the_page_and_an_image_replaces_the_setup_file(tmp_path):
    target, with_image, spelled_out = DATAFLOW
    assert built(target, tmp_path) == built(spelled_out, tmp_path)
    words = built(with_image, tmp_path)
    assert "--sdk_container_image" in words
    assert "--setup_file" not in words
    assert words[words.index("--output") + 1] == "gs://my-bucket/photos-shards"
    assert words[-3:] == ["--holdout", "test=0.1", "--max_num_workers=20"]


FLINK, SPARK, PRISM = [line for line in CLUSTERS if "--runner=" in line and line not in DATAFLOW]


@pytest.mark.parametrize("command", [FLINK, SPARK, PRISM])
def test_a_command_for_a_cluster_is_taken_up_to_its_input(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where there are no photos
    prism = tmp_path / ".tools" / "bin" / "prism"
    prism.parent.mkdir(parents=True)
    prism.touch()
    assert main(words_after_build(command)) == 1
    assert f"SourceError: {tmp_path}/photos" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("command", [SPARK, PRISM])
def test_a_command_for_a_runner_that_starts_by_itself_builds_the_set(
    command, tmp_path, monkeypatch
):
    monkeypatch.chdir(write_inputs(tmp_path))
    (tmp_path / ".tools").symlink_to(REPOSITORY / ".tools")
    assert main(words_after_build(command)) == 0
    assert (tmp_path / "shards" / naming.MANIFEST).exists()


def test_the_page_names_the_versions_that_are_fetched():
    page = (REPOSITORY / "docs/how-to/clusters.md").read_text()
    makefile = (REPOSITORY / "Makefile").read_text()
    assert f"--spark_job_server_jar=.tools/spark/{spark.JOB_SERVER} " in SPARK
    assert f"| Spark {spark.SPARK_VERSION}, Beam's runner {job_server.RUNNER_VERSION} |" in page
    assert f"| Flink {flink.FLINK_VERSION}.0, Beam's runner {job_server.RUNNER_VERSION} |" in page
    assert "PRISM_VERSION ?= v2.77.0\n" in makefile
    assert "| Prism 2.77.0 |" in page
    for runner in beam_options.TESTED:
        assert f"`{runner}`" in page


@pytest.mark.parametrize("target", ["spark", "prism"])
def test_a_runner_is_fetched_by_make(target, tmp_path):
    assert f"make {target}" in CLUSTERS
    arguments = ["--always-make", f"PRISM={tmp_path}/prism"]
    assert target in of_make(shlex.join(["make", target, *arguments]), tmp_path)


def test_the_page_gives_the_flags_that_the_cluster_prints():
    jar = Path(".tools/flink") / flink.JOB_SERVER
    flags = flink.Cluster(Path("run"), jar).flags()
    assert words_after_build(FLINK)[-len(flags) :] == flags


@pytest.mark.parametrize("verb", ["up", "down"])
def test_the_cluster_is_started_and_stopped_by_make(verb, tmp_path):
    assert f"make flink-{verb}" in CLUSTERS
    assert f"-m scripts.flink {verb}" in of_make(f"make flink-{verb}", tmp_path)


def test_the_tests_that_a_page_names_exist():
    named = {
        path
        for page in PAGES
        for path in re.findall(r"tests/[\w/]+\.py", (REPOSITORY / page).read_text())
    }
    assert named
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
