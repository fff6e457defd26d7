"""`shardset job`: prints a JobSet that trains on GKE. It applies nothing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardset.errors import ConfigError
from shardset.html.page import template_of
from shardset.program import PREEMPTED

GRACE_S = 900
MAX_RESTARTS = 10

JOB = "main-job"
"""The only job of the set, which is in the address of the first host."""

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


def compute_of(text: str) -> Compute:
    """What a compute type NAME-COUNT asks for; COUNT is of all chips or GPUs of the job.

    Raises ConfigError.
    """
    name, _, digits = text.replace("v5litepod", "v5e").rpartition("-")
    # More GPUs than five digits are no cluster of GKE, and int() refuses thousands of digits.
    count = int(digits) if re.fullmatch("[0-9]{1,5}", digits) else 0
    if name in TPUS and count in TPUS[name][1]:
        label, topologies = TPUS[name]
        per_host = count if topologies is _FLAT and count <= 8 else 4
        nodes = {
            "cloud.google.com/gke-tpu-accelerator": label,
            "cloud.google.com/gke-tpu-topology": topologies[count],
        }
        return Compute(is_tpu=True, num_hosts=count // per_host, per_host=per_host, nodes=nodes)
    if name in GPUS and (count in (1, 2, 4) or (count and count % 8 == 0)):
        per_host, nodes = min(count, 8), {"cloud.google.com/gke-accelerator": GPUS[name]}
        return Compute(is_tpu=False, num_hosts=count // per_host, per_host=per_host, nodes=nodes)
    expected = (
        f"one of {', '.join([*TPUS, *GPUS])}, and how many: v6e-16, or of GPUs 1, 2, 4, 8, 16"
    )
    if name in TPUS:
        expected = f"{name}- and one of {', '.join(map(str, TPUS[name][1]))} chips"
    raise ConfigError(f"--compute-type {text}: expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training on GKE; `arguments` are the arguments of `train`."""

    name: str
    queue: str
    image: str
    compute: Compute
    arguments: Sequence[str]

    def __post_init__(self) -> None:
        # Kubernetes adds to the name what tells the pods of a job apart.
        most = 63 - len(f"-{JOB}-0-{self.compute.num_hosts - 1}-12345")
        for flag, text, limit in (("--name", self.name, most), ("--queue", self.queue, 63)):
            if len(text) > limit or not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", text):
                raise ConfigError(
                    f"{flag} {text}: Kubernetes refuses it, expected at most {limit} lower-case"
                    " letters, digits and hyphens, a letter first"
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

    def render(self) -> str:
        """The JobSet as YAML, after comments that say how to use it.

        It restarts when a host fails; without limit if the host has saved and ended with code 3, or
        lost its node.
        """
        text = template_of("trainer.tools", "jobset.yaml").render(
            job=self,
            compute=self.compute,
            job_name=JOB,
            restarts=MAX_RESTARTS,
            grace_s=GRACE_S,
            preempted=PREEMPTED,
        )
        return f"{text}\n"
