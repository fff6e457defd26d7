"""Flags of Apache Beam: `build` passes them through, and refuses what neither program knows."""

import argparse
from collections.abc import Sequence

from apache_beam.options.pipeline_options import PipelineOptions, _BeamArgumentParser


def unknown_flags(flags: Sequence[str]) -> list[str]:
    """What of `flags` no option of Beam takes; Beam itself would ignore a misspelled flag silently."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    groups: list[type[PipelineOptions]] = [PipelineOptions, *_subclasses(PipelineOptions)]
    for options in groups:
        if "_add_argparse_args" in vars(options):
            _add_arguments(known, options)
    return known.parse_known_args(list(flags))[1]


def _add_arguments(known: argparse.ArgumentParser, options: type[PipelineOptions]) -> None:
    """Adds the arguments of one group of options; two groups may have the same one."""
    group = _BeamArgumentParser(add_help=False, allow_abbrev=False)
    options._add_argparse_args(group)
    for action in group._actions:
        if not {*action.option_strings} & {*known._option_string_actions}:
            known._add_action(action)


def _subclasses(options: type[PipelineOptions]) -> list[type[PipelineOptions]]:
    children: list[type[PipelineOptions]] = options.__subclasses__()
    return [each for child in children for each in (child, *_subclasses(child))]
