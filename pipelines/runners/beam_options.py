"""Beam's options for a build: the default runner, the number of workers, and checks of the flags.

Runs before anything is written: Beam would report a wrong flag with a traceback after the survey,
ignore it, or wait.
"""

import os
import socket
from argparse import ArgumentParser
from collections.abc import Sequence

from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    StandardOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.portability.prism_runner import PrismJobServer, PrismRunner
from apache_beam.runners.runner import create_runner

from pipelines.runners import dataflow
from pipelines.runners.in_process import num_workers
from shardset.errors import DOCS, ConfigError
from shardset.storage.base import Storage

_CONNECT_TIMEOUT_S = 10

TESTED: tuple[str, ...] = (
    "FnApiRunner",
    "DirectRunner",
    "BundleBasedDirectRunner",
    "PrismRunner",
    "FlinkRunner",
    "SparkRunner",
    "DataflowRunner",
)
"""The runners that tests build with; of Dataflow they submit jobs to a stand-in.

Not PortableRunner: any runner may be behind its --job_endpoint, which these accept too.
"""


class RunnerOptions(PipelineOptions):
    """A flag of ours beside the flags of Beam."""

    @classmethod
    def _add_argparse_args(cls, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--any-runner",
            "--any_runner",
            action="store_true",
            help="build on a runner that no test builds on",
        )


def prepare(flags: Sequence[str], *, source: str, output: Storage) -> PipelineOptions:
    """Beam's options for a build from `source` to `output`; ConfigError if a runner would refuse or
    ignore one.
    """
    options = beam_options(flags, output)
    if dataflow.is_wanted(options):
        dataflow.check(options, source=source, output=output.url)
    _check_job_server(options)
    name = options.view_as(StandardOptions).runner
    kind = str(name).rpartition(".")[2]
    is_tested = {kind.lower(), f"{kind}runner".lower()} & {tested.lower() for tested in TESTED}
    if not (is_tested or options.view_as(RunnerOptions).any_runner):
        raise ConfigError(
            f"--runner {name}: was never tested; use one of {', '.join(TESTED)} (the one that is"
            " behind --job_endpoint, if you give that), leave it out to build here, or add"
            " --any-runner"
        )
    try:
        runner = create_runner(name)
        if isinstance(runner, PrismRunner) and not options.view_as(PortableOptions).job_endpoint:
            PrismJobServer.local_bin(PrismJobServer(options).path_to_binary())
    except (ValueError, ImportError, AttributeError, RuntimeError, OSError) as error:
        raise ConfigError(f"--runner {name}: {error}; leave it out to build here") from error
    if refusals := PipelineOptionsValidator(options, runner).validate():
        raise ConfigError(f"a flag of Apache Beam: {'; '.join(refusals)}")
    return options


def beam_options(flags: Sequence[str], output: Storage) -> PipelineOptions:
    """Beam's options, by default for FnApiRunner on all cores; ConfigError for the mode that loses
    elements.
    """
    options = PipelineOptions(list(flags))
    given = {flag.split("=")[0] for flag in flags}
    if options.get_all_options().get("direct_running_mode") == "multi_threading":
        raise ConfigError(
            "--direct_running_mode=multi_threading loses elements after a GroupByKey (Beam 2.77): "
            "use multi_processing or in_memory"
        )
    if "--runner" not in given:
        options.view_as(StandardOptions).runner = "FnApiRunner"
        _set_workers(options.view_as(DirectOptions), given, in_memory=not output.is_shared)
    if dataflow.is_wanted(options):
        dataflow.set_workers(options)
    options.view_as(SetupOptions).pickle_library = "cloudpickle"
    return options


def limit_workers(
    options: PipelineOptions, flags: Sequence[str], num_units: int, num_bytes: int
) -> None:
    """Leaves out the worker processes that a small input is not worth,
    unless `flags` ask for them.
    """
    if {"--runner", "--direct_num_workers", "--direct_running_mode"} & {
        flag.split("=")[0] for flag in flags
    }:
        return
    direct = options.view_as(DirectOptions)
    direct.direct_num_workers = num_workers(num_units, num_bytes, direct.direct_num_workers)
    if direct.direct_num_workers == 1:
        direct.direct_running_mode = "in_memory"


def unknown_flags(flags: Sequence[str]) -> list[str]:
    """The flags that no options class of Beam accepts; Beam itself would silently ignore a
    misspelled one.
    """
    parsers: list[ArgumentParser] = []
    PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
    return parsers[0].parse_known_args(list(flags))[1]


def _check_job_server(options: PipelineOptions) -> None:
    """Raises ConfigError if no job server answers; Beam would wait for it for five minutes."""
    endpoint = options.view_as(PortableOptions).job_endpoint or ""
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():  # no endpoint, or another kind of address
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"--job_endpoint {endpoint}: no server answers there ({error}); start the job server"
            f" ({DOCS}/how-to/clusters.md)"
        ) from error


def _set_workers(options: DirectOptions, given: set[str], *, in_memory: bool) -> None:
    """Sets one process per core, or the given number, unless the mode is given; Beam's own default
    is one thread.
    """
    if "--direct_running_mode" in given or in_memory:
        return
    if options.direct_num_workers < 0:
        raise ConfigError(
            f"--direct_num_workers is {options.direct_num_workers}, expected a number from 1, or"
            " 0: all"
        )
    if "--direct_num_workers" not in given or not options.direct_num_workers:
        options.direct_num_workers = len(os.sched_getaffinity(0))
    if options.direct_num_workers > 1:
        options.direct_running_mode = "multi_processing"
