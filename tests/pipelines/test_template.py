"""The flex template of Dataflow: every flag of a build is a parameter,
and comes back as that flag.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from google.cloud.dataflow_v1beta3.types import TemplateMetadata

from pipelines import template
from pipelines.cli import main
from pipelines.config import SOURCES, BuildConfig
from pipelines.images.options import ImageOptions
from pipelines.parsers import parser

PARAMETERS = {parameter["name"]: parameter for parameter in template.metadata()["parameters"]}
NEEDED = ["--source=folder", "--input=gs://bucket/raw", "--output=gs://bucket/out"]


def parsed(parameters: list[str]) -> argparse.Namespace:
    return parser().parse_args(template.arguments(parameters))


def test_every_option_of_a_build_is_a_parameter_and_nothing_else_is():
    # The memory limits of images have no flag, and an append is a separate verb.
    fields = {*BuildConfig.__dataclass_fields__, *ImageOptions.__dataclass_fields__} - {
        "image",
        "append",
    }
    assert PARAMETERS.keys() == fields | {"sdk_container_image", "verb", "append"}


def test_dataflow_takes_the_metadata_as_the_program_prints_it():
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.template"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == template.metadata()
    found = TemplateMetadata.from_json(done.stdout)
    assert {parameter.name for parameter in found.parameters} == PARAMETERS.keys()
    assert all(parameter.label and parameter.help_text for parameter in found.parameters)
    required = {parameter.name for parameter in found.parameters if not parameter.is_optional}
    assert required == {"source", "input", "output", "sdk_container_image"}


def test_the_help_of_the_source_names_every_source():
    assert all(name in PARAMETERS["source"]["helpText"] for name in SOURCES)


@pytest.mark.parametrize(
    "name", [name for name, one in PARAMETERS.items() if one["paramType"] == "BOOLEAN"]
)
def test_a_switch_is_given_as_true_or_false(name):
    assert getattr(parsed([*NEEDED, f"--{name}=true"]), name) is True
    assert getattr(parsed([*NEEDED, f"--{name}=false"]), name) is False


@pytest.mark.parametrize(
    "name", [name for name, one in PARAMETERS.items() if one["paramType"] == "ENUM"]
)
def test_a_choice_takes_each_of_its_values(name):
    verb = ["--verb=append"] if name == "append" else []
    for option in PARAMETERS[name]["enumOptions"]:
        assert (
            getattr(parsed([*NEEDED, *verb, f"--{name}={option['value']}"]), name)
            == option["value"]
        )


def test_values_arrive_as_they_are_and_flags_of_beam_stay():
    beam = [
        "--runner=DataflowRunner",
        "--template_location=gs://bucket/job_object",
        "--sdk_container_image=image:1",
    ]
    words = template.arguments(
        [*NEEDED, "--samples_per_shard=train=10,test=5", "--label_column=", *beam]
    )
    assert words == [
        "build",
        "--no-wait",
        *NEEDED,
        "--samples-per-shard=train=10,test=5",
        "--label-column=",
        *beam,
    ]


def test_a_switch_that_is_neither_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed([*NEEDED, "--overwrite=perhaps"])
    assert "ignored explicit argument 'perhaps'" in capsys.readouterr().err


def test_a_build_on_this_machine_can_not_end_before_its_command(tmp_path: Path, capsys):
    assert (
        main(
            [
                "build",
                "--source=folder",
                f"--input={tmp_path}",
                f"--output={tmp_path / 'out'}",
                "--no-wait",
            ]
        )
        == 2
    )
    assert (
        "--no-wait is for --runner DataflowRunner: elsewhere a build ends with this command"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
