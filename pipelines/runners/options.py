"""Beam's options for a build: the default runner, the number of workers, and flags that are refused early.

Checked before anything is written: Beam itself would report a wrong flag with a traceback after the survey, or wait.
"""

import os
import socket
from collections.abc import Sequence

from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    StandardOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.runner import create_runner

from pipelines.runners import dataflow
from shardset.errors import ConfigError
from shardset.storage.base import Storage

_CONNECT_TIMEOUT_S = 10


def prepare(flags: Sequence[str], *, source: str, output: Storage) -> PipelineOptions:
    """Beam's options for a build from `source` into `output`; ConfigError if a runner would refuse or misread them."""
    options = beam_options(flags, output)
    if dataflow.is_wanted(options):
        dataflow.check(options, source=source, output=output.url)
    _check_job_server(options)
    _check_flags(options)
    return options


def beam_options(flags: Sequence[str], output: Storage) -> PipelineOptions:
    """Beam's options: by default FnApiRunner on all cores; refuses the mode that loses elements."""
    options = PipelineOptions(list(flags))
    given = {flag.split("=")[0] for flag in flags}
    if options.get_all_options().get("direct_running_mode") == "multi_threading":
        raise ConfigError(
            "--direct_running_mode=multi_threading loses elements after a GroupByKey (Beam 2.77): "
            "use multi_processing or in_memory"
        )
    _check_runner(options.view_as(StandardOptions).runner)
    if "--runner" not in given:
        options.view_as(StandardOptions).runner = "FnApiRunner"
        _set_workers(options.view_as(DirectOptions), given, in_memory=not output.is_shared)
    options.view_as(SetupOptions).pickle_library = "cloudpickle"
    return options


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_runner(name: str | None) -> None:
    """Raises ConfigError if Beam has no such runner."""
    if name is None:
        return
    try:
        create_runner(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"--runner {name}: {error}; leave it out to build here") from error


def _check_job_server(options: PipelineOptions) -> None:
    """Raises ConfigError if no job server answers, for which Beam would wait five minutes."""
    endpoint = options.view_as(PortableOptions).job_endpoint or ""
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():  # none is given, or another kind of address
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"--job_endpoint {endpoint}: nobody listens there ({error}); start the job server (docs/flink.md)"
        ) from error


def _check_flags(options: PipelineOptions) -> None:
    """Raises ConfigError if Beam refuses a flag."""
    runner = create_runner(options.view_as(StandardOptions).runner)
    refusals = PipelineOptionsValidator(options, runner).validate()
    if refusals:
        raise ConfigError(f"a flag of Apache Beam: {'; '.join(refusals)}")


def _set_workers(options: DirectOptions, given: set[str], *, in_memory: bool) -> None:
    """One process per core, or as many as asked for, unless the mode is given; Beam's own default is one thread."""
    if "--direct_running_mode" in given or in_memory:
        return
    if options.direct_num_workers < 0:
        raise ConfigError(f"--direct_num_workers is {options.direct_num_workers}, expected a number from 1, or 0: all")
    if "--direct_num_workers" not in given or not options.direct_num_workers:
        options.direct_num_workers = num_cores()
    if options.direct_num_workers > 1:
        options.direct_running_mode = "multi_processing"
