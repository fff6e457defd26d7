"""`python -m trainer job`: prints a JobSet that trains on GKE, and the same for Cluster Toolkit.

It applies nothing.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from shardset.errors import ConfigError
from shardset.program import FAILED, PREEMPTED
from shardset.storage.open import is_address
from trainer.config import TrainConfig, addresses_of

GRACE_S = 900
MAX_RESTARTS = 10

_NAMES = {"name": "[a-z]([-a-z0-9]*[a-z0-9])?", "queue": "[a-z0-9]([-.a-z0-9]*[a-z0-9])?"}
"""How Kubernetes names a JobSet, and a LocalQueue that a label names."""

JOB = "main-job"
"""The only job of the set, named as by Cluster Toolkit, so that the first host has one address in
both.
"""

_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBIC = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
}

TPUS = {
    "v5e": ("tpu-v5-lite-podslice", _FLAT),
    "v5p": ("tpu-v5p-slice", _CUBIC),
    "v6e": ("tpu-v6e-slice", _FLAT),
    "tpu7x": ("tpu7x", _CUBIC),
}
"""Of each TPU its label on GKE, and the topology of each number of chips.

A host has 4, but all 8 of a v5e-8 or v6e-8.

From https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and pkg/config/hardware.go
of Cluster Toolkit.
"""

GPUS = {
    "l4": "nvidia-l4",
    "a100-40gb": "nvidia-tesla-a100",
    "a100-80gb": "nvidia-a100-80gb",
    "h100-80gb": "nvidia-h100-80gb",
    "h200-141gb": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
}
"""The label on GKE of each GPU, by its name in Cluster Toolkit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The hosts of a job: their nodes on GKE, and how many chips or GPUs each has."""

    is_tpu: bool
    num_hosts: int
    per_host: int
    nodes: Mapping[str, str]
    gcluster: Sequence[str]
    """The flags of `gcluster job submit` that ask for them."""


def compute_of(text: str) -> Compute:
    """What a compute type NAME-COUNT asks for; COUNT is of all chips or GPUs of the job.

    Raises ConfigError.
    """
    name, _, digits = text.replace("v5litepod", "v5e").rpartition("-")
    # More GPUs than five digits are no cluster of GKE, and int() refuses thousands of digits.
    count = int(digits) if re.fullmatch("[0-9]{1,5}", digits) else 0
    if name in TPUS and count in TPUS[name][1]:
        return _tpus(name, count)
    if name in GPUS and (count in (1, 2, 4) or (count and count % 8 == 0)):
        per_host = min(count, 8)
        flags = [f"--compute-type={name}-{per_host}", f"--num-nodes={count // per_host}"]
        nodes = {"cloud.google.com/gke-accelerator": GPUS[name]}
        return Compute(
            is_tpu=False,
            num_hosts=count // per_host,
            per_host=per_host,
            nodes=nodes,
            gcluster=flags,
        )
    names = ", ".join([*TPUS, *GPUS])
    expected = f"one of {names}, and how many: v6e-16, or of GPUs 1, 2, 4, 8, 16 to 99992"
    if name in TPUS:
        expected = f"{name}- and one of {', '.join(map(str, TPUS[name][1]))} chips"
    raise ConfigError(f"--compute-type {text}: expected {expected}")


def _tpus(name: str, count: int) -> Compute:
    label, topologies = TPUS[name]
    topology, per_host = topologies[count], count if topologies is _FLAT and count <= 8 else 4
    flags = [f"--compute-type={name.replace('v5e', 'v5litepod')}-{count}"]
    # Cluster Toolkit takes its topology instead, and would start two processes on each host
    if name == "tpu7x":
        flags = [
            "--compute-type=tpu7x-standard-4t",
            f"--topology={topology}",
            "--gke-disable-parallel-containers",
        ]
    nodes = {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    return Compute(
        is_tpu=True, num_hosts=count // per_host, per_host=per_host, nodes=nodes, gcluster=flags
    )


def check(config: TrainConfig) -> None:
    """Raises ConfigError unless pods can read all addresses, and the run folder outlives them."""
    for flag, url in addresses_of(config):
        if not is_address(url):
            raise ConfigError(
                f"{flag} {url}: expected an address, such as gs://BUCKET/FOLDER; pods have no such"
                " disk"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training on GKE; `arguments` are those of `train`."""

    name: str
    queue: str
    image: str
    compute: Compute
    arguments: Sequence[str]

    def __post_init__(self) -> None:
        for flag, characters in _NAMES.items():
            name: str = getattr(self, flag)
            # Pods have five more letters, and their number.
            suffix = f"-{JOB}-0-{self.compute.num_hosts - 1}-12345" if flag == "name" else ""
            most = 63 - len(suffix)
            if not re.fullmatch(characters, name) or len(name) > most:
                raise ConfigError(
                    f"--{flag} {name}: Kubernetes refuses it, expected at most {most} characters,"
                    f" as in {characters}",
                )

    @property
    def command(self) -> list[str]:
        """What each host runs: one process for all its chips, or torchrun with a process for each
        GPU.
        """
        compute, train = self.compute, ["-m", "trainer", "train", *self.arguments]
        if compute.is_tpu:
            return ["python", *train]
        first = f"{self.name}-{JOB}-0-0.{self.name}:29500"
        several = [
            f"--nnodes={compute.num_hosts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={first}",
        ]
        hosts = several if compute.num_hosts > 1 else ["--standalone"]
        return ["torchrun", *hosts, f"--nproc-per-node={compute.per_host}", *train]

    def gcluster(self) -> str:
        """The line for Cluster Toolkit, whose rules are simpler: codes 1 and 3 restart, up to the
        limit.
        """
        words = [
            f"--name={self.name}",
            f"--queue={self.queue}",
            *self.compute.gcluster,
            f"--image={self.image}",
        ]
        words += [f"--grace-period={GRACE_S}s", f"--restarts={MAX_RESTARTS}"]
        words.append(f"--restart-on-exit-codes={FAILED},{PREEMPTED}")
        device = ["env", "PJRT_DEVICE=TPU"] if self.compute.is_tpu else []
        return shlex.join(
            [
                "gcluster",
                "job",
                "submit",
                *words,
                f"--command={shlex.join([*device, *self.command])}",
            ]
        )

    def render(self) -> str:
        """The JobSet as YAML, after comments that say how to use it.

        It restarts when a host fails; without limit if the host has saved and ended with code 3, or
        lost its node.
        """
        about = (
            f"For `kubectl apply -f -`, {self.compute.num_hosts} hosts. To resume on other hosts,"
            " give the same "
        )
        about += (
            "command\nwith another --compute-type. With Cluster Toolkit"
            f" instead:\n{self.gcluster()}"
        )
        compute = self.compute
        # All hosts of a TPU slice are one node pool. Its devices belong to root.
        slice_ = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        values: dict[str, Any] = {
            "name": self.name,
            "queue": self.queue,
            "image": self.image,
            "command": self.command,
            "job": JOB,
            "num_hosts": compute.num_hosts,
            "per_host": compute.per_host,
            "nodes": compute.nodes,
            "restarts": MAX_RESTARTS,
            "grace_s": GRACE_S,
            "preempted": PREEMPTED,
            "resource": "google.com/tpu" if compute.is_tpu else "nvidia.com/gpu",
            "annotations": slice_ if compute.is_tpu and compute.num_hosts > 1 else {},
            "user": {"runAsUser": 0} if compute.is_tpu else {},
            "env": [{"name": "PJRT_DEVICE", "value": "TPU"}] if compute.is_tpu else [],
            # NCCL needs more shared memory than a pod's 64 MiB.
            "mounts": [] if compute.is_tpu else [{"name": "shm", "mountPath": "/dev/shm"}],
            "volumes": []
            if compute.is_tpu
            else [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        }
        # JSON is YAML
        quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
        comments = "".join(f"# {line}\n" for line in about.splitlines())
        return comments + Template(Path(__file__).with_name("jobset.yaml").read_text()).substitute(
            quoted
        )
