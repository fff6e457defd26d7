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
    assert all(name in PARAMETERS["source"]["helpText"] for name in SOURCES)
    required = {parameter.name for parameter in found.parameters if not parameter.is_optional}
    assert required == {"source", "input", "output", "sdk_container_image"}


def values_of(parameter: dict) -> dict:
    """What a parameter accepts, and what the build then gets."""
    if parameter["paramType"] == "BOOLEAN":
        return {"true": True, "false": False}
    return {option["value"]: option["value"] for option in parameter.get("enumOptions", ())}


@pytest.mark.parametrize("name", [name for name in PARAMETERS if values_of(PARAMETERS[name])])
def test_a_switch_is_true_or_false_and_a_choice_takes_each_of_its_values(name):
    verb = ["--verb=append"] if name == "append" else []
    for text, value in values_of(PARAMETERS[name]).items():
        assert getattr(parsed([*NEEDED, *verb, f"--{name}={text}"]), name) == value


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


def test_a_build_on_this_machine_can_not_end_before_its_command(tmp_path: Path, said):
    words = ["--source=folder", f"--input={tmp_path}", f"--output={tmp_path / 'out'}", "--no-wait"]
    text = "--no-wait is for --runner DataflowRunner: elsewhere a build ends with this command"
    assert text in said("build", *words, code=2)
    assert not (tmp_path / "out").exists()
