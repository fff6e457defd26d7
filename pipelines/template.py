"""The flex template of Dataflow: its metadata, and what runs in its launcher.

    python -m pipelines.template > metadata.json    for `gcloud dataflow flex-template build
    --metadata-file`

Both come from the flags of `build`, as the command line has them.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from pipelines.cli import main
from pipelines.parsers import add_build
from shardset.program import Parser

LEFT_OUT = ("help", "dry_run", "wait", "report", "catalog")
"""Flags without a meaning in a launcher, which submits the job and ends."""

TEXT = "the image of this template, which the workers run too"
IMAGE = {
    "name": "sdk_container_image",
    "label": "sdk container image",
    "helpText": TEXT,
    "paramType": "TEXT",
}


def metadata() -> dict[str, Any]:
    """The metadata of the template: each flag of `build` as a parameter, called as its field."""
    return {
        "name": "shardset build",
        "description": "Turns raw image files into exact, reproducible WebDataset shards.",
        "parameters": [IMAGE, *(_parameter(name, flag) for name, flag in _flags().items())],
    }


def arguments(parameters: Sequence[str]) -> list[str]:
    """The command line of a build, from parameters as Dataflow's launcher passes them:
    `--NAME=VALUE`.

    Names that are not of the template are Beam's flags, and stay as they are.
    """
    words, flags = [], _flags()
    for parameter in parameters:
        name, _, value = parameter.removeprefix("--").partition("=")
        flag = flags.get(name)
        if flag is None:
            words.append(parameter)
        elif not _is_switch(flag):
            words.append(f"{flag.option_strings[0]}={value}")
        else:  # --name, --no-name
            yes, no = flag.option_strings
            words.append({"true": yes, "false": no}.get(value.lower(), f"{yes}={value}"))
    return words


def launch(parameters: Sequence[str]) -> int:
    """Submits the build without waiting for it; returns the exit code.

    Dataflow's launcher calls it.
    """
    return main(["build", "--no-wait", *arguments(parameters)])


def _flags() -> dict[str, argparse.Action]:
    build = Parser()
    add_build(build)
    return {flag.dest: flag for flag in build.actions if flag.dest not in LEFT_OUT}


def _is_switch(flag: argparse.Action) -> bool:
    return isinstance(flag, argparse.BooleanOptionalAction)


def _parameter(name: str, flag: argparse.Action) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": name, "label": name.replace("_", " "), "helpText": flag.help}
    if not flag.required:
        facts["isOptional"] = True
    if _is_switch(flag):
        return facts | {"paramType": "BOOLEAN"}
    if flag.choices:
        return facts | {
            "paramType": "ENUM",
            "enumOptions": [{"value": choice} for choice in flag.choices],
        }
    return facts | {"paramType": "TEXT"}


if __name__ == "__main__":
    print(json.dumps(metadata(), indent=1))
