"""What must hold before a build goes to Google Cloud Dataflow, and its failures in our words.

Checked before anything is written or submitted: Beam would find a wrong region after it has staged its files, take a
misspelled bucket for a wish and create it, and read across continents without a word.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from apache_beam.options.pipeline_options import (
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)

from shardset.errors import ConfigError, NotFound, StorageError
from shardset.storage.regions import holds

_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
_ZONE = re.compile(r"([a-z]+-[a-z]+[0-9]+)-[a-z]")
_BUCKET = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(/.*)?")


def is_wanted(options: PipelineOptions) -> bool:
    """Whether the build is to run on Dataflow."""
    name = (options.view_as(StandardOptions).runner or "").rpartition(".")[2].lower()
    return name in ("dataflowrunner", "dataflow")  # Beam knows both


def failures(options: PipelineOptions) -> tuple[type[Exception], ...]:
    """What Beam raises when a job failed, or the service that runs it refused it or went away."""
    if not is_wanted(options):
        return RuntimeError, grpc.RpcError
    # Both take a second to import, which other runners do without.
    from apache_beam.runners.dataflow.dataflow_runner import DataflowRuntimeException
    from google.api_core.exceptions import GoogleAPICallError

    return RuntimeError, DataflowRuntimeException, GoogleAPICallError


def location(bucket: str) -> str:
    """Where a bucket lies, as Cloud Storage says it; gives up after 20 s."""
    from shardset.storage.gcs import bucket_location
    from shardset.storage.retry import RetryPolicy

    return bucket_location(bucket, RetryPolicy(give_up_after_s=20))


def check(options: PipelineOptions, *, source: str, output: str, locate: Callable[[str], str] = location) -> None:
    """Raises ConfigError if Dataflow could not run this build from `source` into `output`.

    `locate` tells where a bucket lies. The input's bucket may lie anywhere and need not show where.
    """
    cloud = options.view_as(GoogleCloudOptions)
    _check_project(cloud.project)
    _check_region(cloud.region)
    _check_package(options)
    bucket_of(source, "--input", "the workers can't read this machine's files; copy them to a bucket first")
    places = {
        "--output": bucket_of(
            output, "--output", "the workers can't write to this machine (a dry run needs no runner)"
        ),
        "--temp_location": _bucket_of_folder(
            cloud.temp_location, "--temp_location", "Dataflow keeps its own files there"
        ),
    }
    if cloud.staging_location:
        places["--staging_location"] = _bucket_of_folder(
            cloud.staging_location, "--staging_location", "files are sent there"
        )
    for bucket in dict.fromkeys(places.values()):
        flags = " and ".join(flag for flag, place in places.items() if place == bucket)
        _check_place(flags, bucket, _region_of_workers(options, cloud.region), locate)


def page_of(options: PipelineOptions, result: Any) -> str:
    """Where to watch the job that Beam's DataflowRunner returned."""
    cloud = options.view_as(GoogleCloudOptions)
    return f"https://console.cloud.google.com/dataflow/jobs/{cloud.region}/{result.job_id()}?project={cloud.project}"


def _check_project(project: str | None) -> None:
    if not project:
        raise ConfigError(
            "--project is missing: Dataflow runs in a project of yours; `gcloud projects list` shows them"
        )
    if not _PROJECT.fullmatch(project):
        raise ConfigError(f"--project {project}: expected a project's id such as my-project-1, not its name or number")


def _check_region(region: str | None) -> None:
    if not region:
        raise ConfigError("--region is missing: take that of the bucket, for example --region=europe-west4")
    zone = _ZONE.fullmatch(region)
    if zone:
        raise ConfigError(f"--region {region}: that is a zone, expected its region: --region={zone[1]}")
    if not _REGION.fullmatch(region):
        raise ConfigError(f"--region {region}: expected a region such as europe-west4 or us-central1")


def _region_of_workers(options: PipelineOptions, region: str) -> str:
    """Where the workers run: not in the region that leads the job where another one, or a zone, is named for them."""
    workers = options.view_as(WorkerOptions)
    zone = _ZONE.fullmatch(workers.worker_zone or "")
    return zone[1] if zone else workers.worker_region or region


def _check_package(options: PipelineOptions) -> None:
    setup = options.view_as(SetupOptions)
    if not (setup.setup_file or setup.extra_packages or options.view_as(WorkerOptions).sdk_container_image):
        raise ConfigError(
            "the workers need this package: give --setup_file=./setup.py, or --sdk_container_image with it installed"
        )
    if setup.setup_file and not Path(setup.setup_file).is_file():
        raise ConfigError(f"--setup_file {setup.setup_file}: there is no such file here; expected ./setup.py")


def bucket_of(url: str | None, flag: str, why: str) -> str:
    """The bucket in `gs://BUCKET/...`; ConfigError if the URL that `flag` gave has none."""
    if not url:
        raise ConfigError(f"{flag} is missing: {why}; expected {flag}=gs://BUCKET/FOLDER")
    found = _BUCKET.fullmatch(url)
    if found is None:
        raise ConfigError(f"{flag} {url}: expected gs://BUCKET/FOLDER; {why}")
    return found[1]


def _bucket_of_folder(url: str | None, flag: str, why: str) -> str:
    """The same of a place that must be inside a bucket: for a bare one Beam would take, or create, another bucket."""
    bucket = bucket_of(url, flag, why)
    if url == f"gs://{bucket}":
        raise ConfigError(f"{flag} {url}: expected gs://BUCKET/FOLDER; {why}")
    return bucket


def _check_place(flags: str, bucket: str, region: str, locate: Callable[[str], str]) -> None:
    try:
        location = locate(bucket)
    except NotFound as error:
        create = f"gcloud storage buckets create gs://{bucket} --location={region}"
        raise ConfigError(f"{flags}: there is no bucket {bucket}; check the name, or create it: {create}") from error
    except StorageError as error:
        raise ConfigError(f"{flags}: can't see where bucket {bucket} is ({error})") from error
    if not holds(location, region):
        raise ConfigError(
            f"{flags}: bucket {bucket} is in {location}, the workers would be in {region}: every byte would cross; "
            f"use a bucket in {region}, or a region in {location}"
        )
