"""The flex template of Dataflow: its metadata, and what runs in its launcher.

    python -m pipelines.template > metadata.json    for `gcloud dataflow flex-template build
    --metadata-file`

Both come from the flags of `build` and `append`, as the command line has them.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from pipelines.cli import main
from pipelines.parsers import add_append, add_build
from shardset.errors import ConfigError
from shardset.program import Parser

LEFT_OUT = ("help", "dry_run", "wait", "report")
"""Flags without a meaning in a launcher, which submits the job and ends."""

VERBS = {"build": add_build, "append": add_append}
VERB = {
    "name": "verb",
    "label": "verb",
    "helpText": "build (the default), or append to the set at output",
    "paramType": "ENUM",
    "enumOptions": [{"value": verb} for verb in VERBS],
    "isOptional": True,
}
TEXT = "the image of this template, which the workers run too"
IMAGE = {
    "name": "sdk_container_image",
    "label": "sdk container image",
    "helpText": TEXT,
    "paramType": "TEXT",
}


def metadata() -> dict[str, Any]:
    """The metadata of the template: each flag of its verbs as a parameter, called as its field."""
    flags = _flags("append") | _flags("build")
    return {
        "name": "shardset build",
        "description": "Turns raw image files into exact, reproducible WebDataset shards.",
        "parameters": [
            *(IMAGE, VERB),
            *(_parameter(name, flag) for name, flag in flags.items()),
        ],
    }


def arguments(parameters: Sequence[str]) -> list[str]:
    """The command line of a build or an append, from parameters as Dataflow's launcher passes
    them: `--NAME=VALUE`.

    Names that are not of the template are Beam's flags, and stay as they are.
    """
    pairs = [parameter.removeprefix("--").partition("=") for parameter in parameters]
    verb = next((value for name, _, value in pairs if name == VERB["name"]), "build")
    if verb not in VERBS:
        raise ConfigError(f"verb is {verb!r}, expected one of {', '.join(VERBS)}")
    flags = _flags(verb)
    words = [
        _word(flags[name], value) if name in flags else parameter
        for parameter, (name, _, value) in zip(parameters, pairs, strict=True)
        if name != VERB["name"]
    ]
    return [verb, "--no-wait", *words]


def _word(flag: argparse.Action, value: str) -> str:
    """A flag with its value on the command line."""
    if not flag.option_strings:
        return value
    if not _is_switch(flag):
        return f"{flag.option_strings[0]}={value}"
    yes, no = flag.option_strings  # --name, --no-name
    return {"true": yes, "false": no}.get(value.lower(), f"{yes}={value}")


def launch(parameters: Sequence[str]) -> int:
    """Submits the build without waiting for it; returns the exit code.

    Dataflow's launcher calls it.
    """
    return main(arguments(parameters))


def _flags(verb: str) -> dict[str, argparse.Action]:
    parser = Parser()
    VERBS[verb](parser)
    return {flag.dest: flag for flag in parser.actions if flag.dest not in LEFT_OUT}


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
