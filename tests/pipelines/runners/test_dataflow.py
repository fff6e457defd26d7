"""What is sent to Dataflow, what is refused before, and what becomes of a job that failed."""

import json
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import grpc
import pytest
from apache_beam.options.pipeline_options import DebugOptions, PipelineOptions, StandardOptions
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from pipelines.build import build
from pipelines.runners import beam_options, dataflow, errors
from shardset.errors import ConfigError, NotFound, ShardsetError, StorageError, TooManyBad
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from tests.makers.built import HERE, config_of
from tests.makers.folders import upload, write_class_folders
from tests.makers.stored import files_of
from tests.pipelines.fake_dataflow import FakeDataflow, options_of, serve

REPOSITORY = Path(__file__).parents[3]
IMAGE = "europe-docker.pkg.dev/my-project/images/shardset:1"
GOOD = {
    "runner": "DataflowRunner",
    "project": "my-project",
    "region": "us-central1",
    "temp_location": "gs://bucket/tmp",
    "setup_file": str(REPOSITORY / "setup.py"),
}

# What is refused before anything is sent


def options(**changes: str | None) -> PipelineOptions:
    return PipelineOptions(
        [f"--{name}={value}" for name, value in (GOOD | changes).items() if value is not None]
    )


def check(
    *,
    source: str = "gs://photos/raw",
    output: str = "gs://bucket/out",
    where: str = "US-CENTRAL1",
    **changes,
):
    dataflow.check(options(**changes), source=source, output=output, locate=lambda bucket: where)


def test_a_complete_command_is_accepted():
    check()
    check(setup_file=None, sdk_container_image=IMAGE)
    check(region="europe-west4", where="EU")
    # the job is led from one region, its workers in another
    check(worker_region="europe-west4", where="EUROPE-WEST4")


@pytest.mark.parametrize(
    ("given", "threads"), [([], 4), (["--number_of_worker_harness_threads=12"], 12)]
)
def test_the_threads_of_a_worker_process_are_few_unless_a_number_is_given(given, threads):
    flags = [f"--{name}={value}" for name, value in GOOD.items()]
    found = beam_options.beam_options([*flags, *given], MemoryStorage("nothing"))
    assert found.view_as(DebugOptions).number_of_worker_harness_threads == threads


@pytest.mark.parametrize(
    ("given", "hints"),
    [
        ([], ["min_ram=4GB"]),
        (["--resource_hints=min_ram=9GB"], ["min_ram=9GB"]),
        (["--flexrs_goal=COST_OPTIMIZED"], []),
    ],
)
def test_the_memory_of_a_worker_holds_a_group_of_references_unless_hints_are_given(given, hints):
    flags = [f"--{name}={value}" for name, value in GOOD.items()]
    found = beam_options.beam_options([*flags, *given], MemoryStorage("nothing"))
    assert found.view_as(StandardOptions).resource_hints == hints


def test_dataflow_is_recognised_however_it_is_spelled():
    runners = [
        "DataflowRunner",
        "Dataflow",
        "apache_beam.runners.DataflowRunner",
        "FlinkRunner",
        None,
    ]
    assert [dataflow.is_wanted(options(runner=runner)) for runner in runners] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"region": "europe-west4-a"}, "the workers would be in europe-west4-a"),
        ({"temp_location": None}, "--temp_location is missing"),
        (
            {"temp_location": "gs://bucket"},
            "--temp_location gs://bucket: expected gs://BUCKET/FOLDER",
        ),
        ({"staging_location": "/tmp"}, "--staging_location /tmp: expected gs://BUCKET/FOLDER"),
        ({"setup_file": None}, "the workers need this package: give --setup_file=./setup.py"),
        (
            {"setup_file": "nowhere/setup.py"},
            "--setup_file nowhere/setup.py: there is no such file",
        ),
        (
            {"source": "photos"},
            "--input photos: expected gs://BUCKET/FOLDER; the workers can't read this machine",
        ),
        (
            {"output": "shards"},
            "--output shards: expected gs://BUCKET/FOLDER; the workers can't write",
        ),
        (
            {"where": "EUROPE-WEST4"},
            "bucket bucket is in EUROPE-WEST4, the workers would be in us-central1",
        ),
        (
            {"worker_region": "europe-west4"},
            "bucket bucket is in US-CENTRAL1, the workers would be in europe-west4",
        ),
    ],
)
def test_what_dataflow_could_not_do_is_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check(**changes)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            NotFound("gone"),
            (
                "there is no bucket bucket.*gcloud storage buckets create gs://bucket"
                " --location=us-central1"
            ),
        ),
        (StorageError("403: you may not"), "can't see where bucket bucket is .403: you may not"),
    ],
)
def test_a_bucket_that_can_not_be_seen_is_refused(error, sentence):
    def locate(bucket: str) -> str:
        raise error

    with pytest.raises(ConfigError, match=f"--output and --temp_location: {sentence}"):
        dataflow.check(options(), source="gs://photos/raw", output="gs://bucket/out", locate=locate)


# What a job's failure becomes


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            (
                "Dataflow pipeline failed. State: FAILED, Error:\nWorkflow failed. Causes: quota of"
                " CPUS exceeded"
            ),
            "the job ended as FAILED (Workflow failed. Causes: quota of CPUS exceeded)",
        ),
        (
            "Dataflow pipeline failed. State: CANCELLED, Error:\nNone",
            "the job ended as CANCELLED (no reason given)",
        ),
        (
            (
                "Pipeline x-1_2 failed in state FAILED: Traceback (most recent call last):\n "
                " File\nOSError: disk full\n"
            ),
            "the job ended as FAILED (OSError: disk full)",
        ),
        (
            (
                "Dataflow pipeline failed. State: FAILED, Error:\nTraceback (most recent call"
                " last):\n  File\nshardset.errors.TooManyBad: split 'train': 1 of 61 raw samples"
                " are bad [while running 'Plan']\n"
            ),
            "split 'train': 1 of 61 raw samples are bad",
        ),
    ],
)
def test_a_failed_job_becomes_one_sentence(text, sentence):
    with pytest.raises(ShardsetError, match=re.escape(sentence)), errors.translated():
        raise RuntimeError(text)


def errors_of(kind: type[ShardsetError]) -> list[type[ShardsetError]]:
    return [kind, *(below for one in kind.__subclasses__() for below in errors_of(one))]


@pytest.mark.parametrize("kind", errors_of(ShardsetError), ids=lambda kind: kind.__name__)
def test_an_error_of_a_worker_comes_back_as_what_it_was_wherever_it_is_defined(kind):
    name = f"{kind.__module__}.{kind.__qualname__}"
    text = f"Traceback (most recent call last):\n{name}: gs://a/b.tar: is damaged\n"
    with pytest.raises(kind, match=r"^gs://a/b\.tar: is damaged$") as caught, errors.translated():
        raise RuntimeError(text)
    assert type(caught.value) is kind


def test_our_own_error_of_a_runner_in_this_process_loses_the_step_that_beam_adds():
    with pytest.raises(TooManyBad) as caught, errors.translated():
        raise TooManyBad(
            "split 'train': 1 of 61 raw samples are bad [while running 'Plan/ParDo(Step)']"
        )
    assert str(caught.value) == "split 'train': 1 of 61 raw samples are bad"


class HungUp(grpc.RpcError):
    """As it was seen when a job server was killed."""

    def __str__(self) -> str:
        return (
            "<_MultiThreadedRendezvous of RPC that terminated with:\n\tstatus ="
            ' StatusCode.UNAVAILABLE\n\tdetails = "Stream removed (Socket'
            ' closed)"\n\tdebug_error_string = "UNAVAILABLE:Stream removed"\n>'
        )


def test_a_job_server_that_dies_is_said_in_one_sentence():
    failures = dataflow.failures(options(runner="PortableRunner"))
    sentence = re.escape("the job server is gone (Stream removed (Socket closed)); start it again")
    with pytest.raises(ShardsetError, match=sentence), errors.translated(failures):
        raise HungUp


def test_an_error_that_is_nobody_s_stays_what_it_is():
    with pytest.raises(RuntimeError, match="a bug"), errors.translated():
        raise RuntimeError("a bug")


# What is sent


@pytest.fixture
def service() -> Iterator[tuple[FakeDataflow, str]]:
    with serve() as found:
        yield found


@pytest.fixture
def raw(tmp_path: Path, gcs_root: str) -> str:
    """A folder of pictures on gs://."""
    upload(write_class_folders(tmp_path / "raw", ["cat", "dog"], 10), f"{gcs_root}/raw")
    return f"{gcs_root}/raw"


def flags_of(endpoint: str, raw: str) -> list[str]:
    """A build of `raw` on Dataflow, into the folder next to it."""
    folder = raw.removesuffix("/raw")
    build = f"--source=folder --input={raw} --output={folder}/out --holdout=test=0.3"
    job = "--runner=DataflowRunner --project=my-project --region=us-central1"
    where = f"--temp_location={folder}/tmp --dataflow_endpoint={endpoint} --no_auth"
    return f"{build} {job} --job_name=shards-of-cats {where}".split()


def python(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


def submit(
    endpoint: str, raw: str, *flags: str, package: str = "--setup_file=./setup.py"
) -> subprocess.CompletedProcess[str]:
    words = ["build", "--json", "--num-shards=3", package, *flags_of(endpoint, raw), *flags]
    return python("-m", "pipelines", *words)


def built_here(raw: str, folder: Path) -> dict[str, bytes]:
    """The files of the same set, built in this process."""
    build(config_of(raw, folder / "out", holdout={"test": 0.3}), HERE)
    return files_of(folder / "out")


@pytest.mark.slow
@pytest.mark.gcs
def test_a_job_carries_its_package_and_options_and_writes_what_the_local_runner_writes(
    service, raw, tmp_path
):
    dataflows, endpoint = service
    done = submit(endpoint, raw, "--max_num_workers=7", "--machine_type=n2d-standard-4")
    assert done.returncode == 0, done.stderr[-3000:]
    (job,) = dataflows.jobs.values()
    root = raw.removesuffix("/raw")
    assert (job["project"], job["region"], job["name"]) == (
        "my-project",
        "us-central1",
        "shards-of-cats",
    )
    assert job["environment"]["tempStoragePrefix"].startswith(
        root.replace("gs:/", "storage.googleapis.com") + "/tmp"
    )
    carried = options_of(job)
    assert carried["runner"] == "DataflowRunner"
    assert carried["pickle_library"] == "cloudpickle"
    (pool,) = job["environment"]["workerPools"]
    assert pool["machineType"] == "n2d-standard-4"
    assert pool["numThreadsPerWorker"] == 4
    assert pool["autoscalingSettings"]["maxNumWorkers"] == 7
    assert "beam_python3.11_sdk" in pool["sdkHarnessContainerImages"][0]["containerImage"]
    (package,) = [package for package in pool["packages"] if package["name"] == "workflow.tar.gz"]
    check_package(package["location"])
    check_steps(carried["pipelineUrl"])
    assert files_of(f"{root}/out") == built_here(raw, tmp_path)
    assert json.loads(done.stdout)["counters"] == {"shards_written": 6}
    assert (
        "https://console.cloud.google.com/dataflow/jobs/us-central1/job-0?project=my-project"
        in done.stderr
    )
    assert "4 threads in each worker process" in done.stderr


def staged_bytes(location: str) -> bytes:
    folder, _, name = location.replace("storage.googleapis.com/", "gs://").rpartition("/")
    return open_storage(folder).read(name)


def check_package(location: str) -> None:
    """The staged sdist has our code, and asks for no more than a worker needs."""
    with tarfile.open(fileobj=BytesIO(staged_bytes(location))) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        (requires,) = [name for name in tar.getnames() if name.endswith("egg-info/requires.txt")]
        base = tar.extractfile(requires).read().decode().partition("[")[0]
    assert {"pipelines/pipeline.py", "shardset/storage/base.py", "setup.py", "README.md"} <= names
    assert "pillow" in base
    assert "torch" not in base
    assert "apache-beam" not in base


def check_steps(url: str) -> None:
    """The staged pipeline has the steps that the design names."""
    pipeline = beam_runner_api_pb2.Pipeline.FromString(staged_bytes(url))
    transforms = pipeline.components.transforms.values()
    steps = {each.unique_name for each in transforms}
    assert {
        "Index the input/List the units of each block",
        "Index the input/Index each unit",
        "Plan the shards/Plan once all units are indexed",
        "Write the shards/Write the references of each group",
        "Write the shards/Write each shard",
        "Publish the set/Publish once all shards are written",
    } <= steps
    # all with one environment: a second one would have its own workers
    (name,) = {each.environment_id for each in transforms} - {""}
    assert common_urns.resource_hints.MIN_RAM_BYTES.urn in (
        pipeline.components.environments[name].resource_hints
    )


def published(dataflows: FakeDataflow, raw: str, tmp_path: Path) -> None:
    """Waits for the job, and compares its set with one that is built here."""
    (job,) = dataflows.jobs
    deadline = time.monotonic() + 120
    while dataflows.states[job] == "JOB_STATE_RUNNING" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert dataflows.states[job] == "JOB_STATE_DONE", dataflows.errors
    assert files_of(raw.removesuffix("/raw") + "/out") == built_here(raw, tmp_path)


@pytest.mark.slow
@pytest.mark.gcs
def test_a_command_that_does_not_wait_leaves_a_job_that_publishes_the_set(service, raw, tmp_path):
    dataflows, endpoint = service
    done = submit(endpoint, raw, "--no-wait", package=f"--sdk_container_image={IMAGE}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "https://console.cloud.google.com/dataflow/jobs/us-central1/job-0"
        in json.loads(done.stdout)["job"]
    )
    published(dataflows, raw, tmp_path)


@pytest.mark.slow
@pytest.mark.gcs
def test_the_launcher_of_the_template_leaves_a_job_for_dataflow_to_start(service, raw, tmp_path):
    dataflows, endpoint = service
    folder = raw.removesuffix("/raw")
    parameters = ["--num_shards=3", f"--sdk_container_image={IMAGE}"]
    parameters += [f"--template_location={folder}/tmp/job_object"]
    code = "import sys; from pipelines.template import launch; sys.exit(launch(sys.argv[1:]))"
    done = python("-c", code, *parameters, *flags_of(endpoint, raw))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"the job is in {folder}/tmp/job_object, from where Dataflow starts it\n"
    assert not dataflows.jobs  # the launcher submits nothing itself
    job = json.loads(open_storage(f"{folder}/tmp").read("job_object"))
    (pool,) = job["environment"]["workerPools"]
    assert pool["sdkHarnessContainerImages"][0]["containerImage"] == IMAGE
    dataflows.create("my-project", "us-central1", job)
    published(dataflows, raw, tmp_path)


@pytest.mark.slow
@pytest.mark.gcs
def test_our_own_error_in_a_worker_comes_back_as_itself(service, raw):
    open_storage(raw).write("cat/bad.png", b"no picture")
    done = submit(service[1], raw, "--max-bad-fraction=0", package=f"--sdk_container_image={IMAGE}")
    assert done.returncode == 1
    assert re.search(r"TooManyBad: split '\w+': 1 of \d+ raw samples are bad", done.stderr)


@pytest.mark.slow
@pytest.mark.gcs
def test_a_job_that_the_service_refuses_ends_with_code_1_and_its_reason(service, raw):
    dataflows, endpoint = service
    dataflows.refusal = (
        403,
        "Dataflow API has not been used in project my-project before or it is disabled.",
    )
    done = submit(endpoint, raw, package=f"--sdk_container_image={IMAGE}")
    assert done.returncode == 1
    assert "the service did not take the job (403 " in done.stderr
    assert "Dataflow API has not been used" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gcs
@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        (
            "--region=europe-west4",
            "bucket bucket is in US-CENTRAL1, the workers would be in europe-west4",
        ),
        (
            "--temp_location=gs://no-such-bucket/tmp",
            "--temp_location: there is no bucket no-such-bucket",
        ),
    ],
)
def test_a_wrong_region_or_bucket_ends_with_code_2_and_sends_and_writes_nothing(
    service, raw, flag, sentence
):
    dataflows, endpoint = service
    done = submit(endpoint, raw, flag)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert dataflows.jobs == {}
    assert [
        found.name
        for found in open_storage(raw.removesuffix("/raw")).list()
        if "raw/" not in found.name
    ] == []
