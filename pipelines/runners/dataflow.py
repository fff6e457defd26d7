"""Checks the options of a build on Google Cloud Dataflow, and lists the errors of a failed job.

Runs before anything is written or submitted: Beam would report a wrong region only after it has
staged its files, create a bucket with a misspelled name, and read across continents without a
warning.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)

from shardset.errors import ConfigError, NotFound, StorageError
from shardset.storage.open import is_region

HARNESS_THREADS = 4
"""Threads of a worker process, unless --number_of_worker_harness_threads says otherwise: Dataflow's
own number is 12 or more, and each holds a unit of input (40 MiB), or a shard that it writes.
"""

MIN_RAM = "4GB"
"""What a worker needs, unless --resource_hints says otherwise: the largest group of references is
2.6 GB. The hint is for all steps: one for a single step would give that its own workers.
"""

_BUCKET = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(/.*)?")


def is_wanted(options: PipelineOptions) -> bool:
    """Whether the build runs on Dataflow."""
    name = (options.view_as(StandardOptions).runner or "").rpartition(".")[2].lower()
    return name in ("dataflowrunner", "dataflow")  # Beam accepts both


def failures(options: PipelineOptions) -> tuple[type[Exception], ...]:
    """The errors that Beam raises if a job fails, or if the service refuses it or is lost."""
    if not is_wanted(options):
        return RuntimeError, grpc.RpcError
    # Imported here because both take a second to import.
    from apache_beam.runners.dataflow.dataflow_runner import DataflowRuntimeException
    from google.api_core.exceptions import GoogleAPICallError

    return RuntimeError, DataflowRuntimeException, GoogleAPICallError


def location(bucket: str) -> str:
    """The location of a bucket in the spelling of Cloud Storage; gives up after 20 s."""
    from shardset.storage.gcs import GcsStorage
    from shardset.storage.retry import RetryPolicy

    return GcsStorage(bucket, retry=RetryPolicy(deadline_s=20)).location()


def check(
    options: PipelineOptions, *, source: str, output: str, locate: Callable[[str], str] = location
) -> None:
    """Raises ConfigError if Dataflow can't run a build from `source` to `output`.

    `locate` returns the location of a bucket. The bucket of the input may be anywhere, and its
    location may be hidden.
    """
    cloud = options.view_as(GoogleCloudOptions)
    _check_package(options)
    _bucket_of(
        "--input",
        source,
        "the workers can't read this machine's files; copy them to a bucket first",
    )
    no_runner = "the workers can't write to this machine (a dry run needs no runner)"
    buckets = {"--output": _bucket_of("--output", output, no_runner)}
    folders = {"--temp_location": cloud.temp_location}
    if cloud.staging_location:
        folders["--staging_location"] = cloud.staging_location
    for flag, folder in folders.items():
        buckets[flag] = _bucket_of(
            flag, folder, "Dataflow keeps its own files there", in_folder=True
        )
    for bucket in dict.fromkeys(buckets.values()):
        flags = " and ".join(flag for flag, other in buckets.items() if other == bucket)
        region = options.view_as(WorkerOptions).worker_region or cloud.region
        _check_location(flags, bucket, region, locate)


def set_workers(options: PipelineOptions) -> None:
    """Sets the threads and the memory of a worker unless they are given."""
    debug, standard = options.view_as(DebugOptions), options.view_as(StandardOptions)
    debug.number_of_worker_harness_threads = (
        debug.number_of_worker_harness_threads or HARNESS_THREADS
    )
    if not options.view_as(GoogleCloudOptions).flexrs_goal:  # which accepts no hints
        standard.resource_hints = standard.resource_hints or [f"min_ram={MIN_RAM}"]


def started(options: PipelineOptions, result: Any) -> str:
    """The message once a job runs: its console page, and the threads of its workers.

    The launcher of a flex template only writes the job to `--template_location`, from where
    Dataflow starts it.
    """
    cloud, threads = (
        options.view_as(GoogleCloudOptions),
        options.view_as(DebugOptions).number_of_worker_harness_threads,
    )
    if cloud.template_location:
        return f"the job is in {cloud.template_location}, from where Dataflow starts it"
    where = f"{cloud.region}/{result.job_id()}?project={cloud.project}"
    page = f"https://console.cloud.google.com/dataflow/jobs/{where}"
    return (
        f"the job continues at {page}; {threads} threads in each worker process"
        " (--number_of_worker_harness_threads)"
    )


def _check_package(options: PipelineOptions) -> None:
    setup = options.view_as(SetupOptions)
    if not (
        setup.setup_file
        or setup.extra_packages
        or options.view_as(WorkerOptions).sdk_container_image
    ):
        raise ConfigError(
            "the workers need this package: give --setup_file=./setup.py, or --sdk_container_image"
            " with it installed"
        )
    if setup.setup_file and not Path(setup.setup_file).is_file():
        raise ConfigError(
            f"--setup_file {setup.setup_file}: there is no such file here; expected ./setup.py"
        )


def _bucket_of(flag: str, url: str | None, why: str, *, in_folder: bool = False) -> str:
    """The bucket in `gs://BUCKET/...`; ConfigError if there is none, or if a folder is required and
    missing.
    """
    if not url:
        raise ConfigError(f"{flag} is missing: {why}; expected {flag}=gs://BUCKET/FOLDER")
    match = _BUCKET.fullmatch(url)
    # for a bare bucket, Beam would use or create another one
    if match is None or (in_folder and match[2] is None):
        raise ConfigError(f"{flag} {url}: expected gs://BUCKET/FOLDER; {why}")
    return match[1]


def _check_location(flags: str, bucket: str, region: str, locate: Callable[[str], str]) -> None:
    try:
        where = locate(bucket)
    except NotFound as error:
        create = f"gcloud storage buckets create gs://{bucket} --location={region}"
        raise ConfigError(
            f"{flags}: there is no bucket {bucket}; check the name, or create it: {create}"
        ) from error
    except StorageError as error:
        raise ConfigError(f"{flags}: can't see where bucket {bucket} is ({error})") from error
    if is_region(where) and where.lower() != region:
        raise ConfigError(
            f"{flags}: bucket {bucket} is in {where}, the workers would be in {region}: every byte"
            f" would cross; use a bucket in {region}, or the region {where.lower()}"
        )
