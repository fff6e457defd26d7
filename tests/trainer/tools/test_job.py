"""`trainer job`: the JobSet fits the schema of its CRD, its hosts and restarts are right, and
nothing is applied.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shardset.errors import ConfigError
from shardset.program import OK, PREEMPTED, USAGE
from tests.makers.documented import shown
from trainer import cli
from trainer.tools import job

ROOT = Path(__file__).parents[3]
IMAGE = "europe-docker.pkg.dev/my-project/images/shardset:1"
TRAIN = [
    "--recipe=imagenet_resnet50",
    "--manifest=gs://my-bucket/imagenet",
    "--run-dir=gs://my-bucket/rn50",
]
TYPES = [f"{name}-{count}" for name, (_, topologies) in job.TPUS.items() for count in topologies]
TYPES += [f"{name}-{count}" for name in job.GPUS for count in (1, 2, 4, 8, 64)]


def strict(schema):
    """The schema without room for unknown fields, which the CRD's own would drop silently."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = (
        {"additionalProperties": False}
        if isinstance(schema.get("properties"), dict) and "type" in schema
        else {}
    )
    return closed | {name: strict(part) for name, part in schema.items()}


SCHEMA = strict(json.loads((ROOT / "tests/data/jobset.schema.json").read_text()))


def printed(capsys, compute_type, *flags: str):
    """The JobSet that the command prints."""
    assert cli.main(["job", f"--compute-type={compute_type}", f"--image={IMAGE}", *flags]) == OK
    jobset: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return jobset


def pods(jobset):
    """The specification of the only job, and that of its pods."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    return spec, spec["template"]["spec"]


@pytest.mark.parametrize("compute_type", TYPES)
def test_every_compute_type_makes_a_jobset_that_fits_the_schema(compute_type):
    compute = job.compute_of(compute_type)
    made = job.Job(name="train", queue="q", image=IMAGE, compute=compute, arguments=TRAIN)
    jobset = yaml.safe_load(made.render())
    jsonschema.validate(jobset, SCHEMA)
    spec, pod = pods(jobset)
    (limit,) = pod["containers"][0]["resources"]["limits"].values()
    assert spec["parallelism"] * limit == int(compute_type.rpartition("-")[2])


@pytest.mark.parametrize("line", shown("shardset job "))
def test_a_command_of_the_documentation_prints_a_jobset_that_fits_the_schema(line, capsys):
    assert cli.main(shlex.split(line)[1:]) == OK, capsys.readouterr().err
    jsonschema.validate(yaml.safe_load(capsys.readouterr().out), SCHEMA)


@pytest.mark.parametrize(
    ("compute_type", "label", "topology", "hosts", "chips"),
    [
        ("v5litepod-16", "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v5p-8", "tpu-v5p-slice", "2x2x2", 2, 4),
        ("v6e-1", "tpu-v6e-slice", "1x1", 1, 1),
        ("v6e-256", "tpu-v6e-slice", "16x16", 64, 4),
        ("tpu7x-64", "tpu7x", "4x4x4", 16, 4),
    ],
)
def test_a_tpu_has_the_hosts_and_the_topology_of_gke(
    capsys, compute_type, label, topology, hosts, chips
):
    spec, pod = pods(printed(capsys, compute_type, *TRAIN))
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert spec["parallelism"] == spec["completions"] == hosts
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": chips}}
    assert container["command"] == ["python", "-m", "trainer", "train", *TRAIN]
    assert container["env"] == [{"name": "PJRT_DEVICE", "value": "TPU"}]


def test_gpus_are_started_by_torchrun_on_every_host(capsys):
    jobset = printed(capsys, "h100-80gb-16", *TRAIN)
    spec, pod = pods(jobset)
    (container,) = pod["containers"]
    first, *rest = container["command"]
    assert first == "torchrun"
    assert rest[:4] == [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=train-main-job-0-0.train:29500",
        "--nproc-per-node=8",
    ]
    assert rest[4:] == ["-m", "trainer", "train", *TRAIN]
    assert spec["parallelism"] == 2
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert container["volumeMounts"] == [
        {"name": pod["volumes"][0]["name"], "mountPath": "/dev/shm"}
    ]
    assert "annotations" not in jobset["metadata"]  # several jobs may share a node pool of GPUs
    one = pods(printed(capsys, "l4-1", *TRAIN))[1]["containers"][0]["command"]
    assert one[:3] == ["torchrun", "--standalone", "--nproc-per-node=1"]


def test_a_saved_or_evicted_run_restarts_without_limit_and_a_failed_one_with(capsys):
    jobset = printed(capsys, "v6e-16", *TRAIN)
    spec, pod = pods(jobset)
    assert spec["backoffLimit"] == 0  # no pod restarts by itself: the hosts compute together
    assert pod["restartPolicy"] == "Never"
    saved, evicted = spec["podFailurePolicy"]["rules"]
    assert saved["onExitCodes"] == {
        "containerName": "trainer",
        "operator": "In",
        "values": [PREEMPTED],
    }
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert saved["action"] == evicted["action"] == "FailJob"
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == job.MAX_RESTARTS
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == (
        "RestartJobSetAndIgnoreMaxRestarts",
        ["PodFailurePolicy"],
    )
    assert pod["terminationGracePeriodSeconds"] == job.GRACE_S


def test_name_queue_and_flags_of_the_training_arrive_whatever_is_in_them(capsys):
    flags = ["--name=night", "--queue=tpus", '--set=model.name=a"b: #c\ny: z', "--no-compile"]
    jobset = printed(capsys, "v6e-16", *TRAIN, *flags)
    assert jobset["metadata"]["name"] == "night"
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "tpus"}
    command = pods(jobset)[1]["containers"][0]["command"]
    assert command[-2:] == ["--no-compile", flags[2]]


@pytest.mark.parametrize(
    ("compute_type", "sentence"),
    [
        (
            "v6e-12",
            "--compute-type v6e-12: expected v6e- and one of 1, 4, 8, 16, 32, 64, 128, 256 chips",
        ),
        ("h100-80gb-12", "--compute-type h100-80gb-12: expected one of v5e, "),
        ("v3-32", "--compute-type v3-32: expected one of v5e, v5p, v6e, "),
        (f"l4-{'8' * 5000}", "or of GPUs 1, 2, 4, 8, 16"),
    ],
)
def test_an_unknown_compute_type_is_refused_with_those_that_there_are(compute_type, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        job.compute_of(compute_type)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            [*TRAIN[:2], "--run-dir=run"],
            "--run-dir run: expected an address, such as gs://BUCKET/FOLDER",
        ),
        ([*TRAIN, "--manifest=shards"], "--manifest shards: expected an address"),
        ([*TRAIN, "--resume=run/checkpoints"], "--resume run/checkpoints: expected an address"),
        ([*TRAIN, "--mix=gs://b/a=1", "--mix=photos=1"], "--mix photos: expected an address"),
        ([*TRAIN, "--name=Train_X"], "--name Train_X: Kubernetes refuses it, expected at most 44"),
        ([*TRAIN, f"--name={'n' * 45}"], "Kubernetes refuses it, expected at most 44"),
        ([*TRAIN, "--name=train-"], "--name train-: Kubernetes refuses it"),
        ([*TRAIN, "--queue=my queue"], "--queue my queue: Kubernetes refuses it"),
    ],
)
def test_what_could_not_run_in_a_pod_is_refused_before_anything_is_printed(capsys, flags, sentence):
    assert cli.main(["job", "--compute-type=v6e-16", f"--image={IMAGE}", *flags]) == USAGE
    out, err = capsys.readouterr()
    assert (out, sentence in err) == ("", True), err
