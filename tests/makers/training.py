"""Tiny runs of the trainer: a shard set, a config that takes a second, and what the run wrote."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardset.settings import value_text, values_of
from shardset.storage.open import open_storage
from tests.makers.shardset import new_set, png_samples
from trainer.config import ImageConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from trainer.run_folder.names import METRICS

NUM_TRAIN = 52
NUM_EVAL = 21
BATCH = 8
STEPS = 7
"""Steps of an epoch: 52 samples in batches of 8, the last one with pads."""


def shard_set(folder: Path, *, size: int = 8) -> str:
    """A shard set of PNGs with the splits train and val; returns its URL."""
    samples = {
        "train": png_samples("train", NUM_TRAIN, size=size),
        "val": png_samples("val", NUM_EVAL, size=size),
    }
    return new_set(samples, folder, num_shards=4)


def tiny_config(manifest: str | None, run_dir: Path | str, **changes: Any) -> TrainConfig:
    """Two epochs of seven steps that log every step, on one device."""
    base = TrainConfig(
        recipe="tiny",
        manifest=manifest,
        run_dir=str(run_dir),
        epochs=2,
        global_batch_size=BATCH,
        strategy="single",
        log_every_steps=1,
        model=ModelConfig(name="trainer.model:tiny_resnet"),
        image=ImageConfig(size=8, train_crop="pad", eval_resize=8),
        optimizer=OptimizerConfig(learning_rate=0.05),
        schedule=ScheduleConfig(warmup_epochs=1.0),
    )
    return replace(base, **changes)


def arguments(config: TrainConfig, verb: str = "train", program: str = "trainer") -> list[str]:
    """The command line of `python -m PROGRAM VERB` that means this config."""
    values = values_of(config)
    known = [f"--set={key}={value_text(value)}" for key, value in values.items() if key != "recipe"]
    return ["-m", program, verb, *known]


def tiny_flags(manifest, run_dir):
    """The flags of a tiny run as a user writes them."""
    return f"""--manifest {manifest} --run-dir {run_dir} --strategy single --global-batch-size 8
        --model trainer.model:tiny_resnet --set image.size=8 --set image.train_crop=pad
        --set image.eval_resize=8 --set log_every_steps=1""".split()


def trainer(
    config: TrainConfig,
    *,
    verb: str = "train",
    devices: int = 1,
    processes: int = 0,
    environment: dict[str, str] | None = None,
    program: str = "trainer",
    python: str = sys.executable,
) -> subprocess.Popen[str]:
    """The trainer in a separate process: with that many XLA:CPU devices, or under torchrun with
    so many processes.
    """
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes
        else []
    )
    extra = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), **(environment or {})}
    return subprocess.Popen(
        [python, *launcher, *arguments(config, verb, program)],
        env=clean_environment() | extra,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def clean_environment() -> dict[str, str]:
    """Without what chooses devices, and with one thread, as in the other processes: sums depend on
    their number.
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XLA_", "PJRT_", "CPU_NUM"))
    }
    return clean | {"OMP_NUM_THREADS": "1"}


def finish(process: subprocess.Popen[str], timeout_s: float = 600) -> tuple[int, str]:
    """Exit code and output of a process, which is killed if it takes longer."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, output


def read_records(run_dir: Path | str, kind: str) -> list[dict[str, Any]]:
    """The records of one kind that a run wrote, the last one for each step; without a line that a
    kill has cut.
    """
    lines = open_storage(str(run_dir)).read(METRICS).splitlines()
    found = [json.loads(line) for line in lines if line.endswith(b"}")]
    newest = {one["global_step"]: one for one in found if one["kind"] == kind}
    return [newest[step] for step in sorted(newest)]


def losses(run_dir: Path | str) -> list[float]:
    """The loss of each step."""
    return [record["loss"] for record in read_records(run_dir, "step")]


def largest_difference(left: Iterable[float], right: Iterable[float]) -> float:
    """Between two sequences of the same length."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def when(
    path: Path, condition: Callable[[list[dict[str, Any]]], bool], process: subprocess.Popen[str]
) -> None:
    """Waits until the records in a growing `metrics.jsonl` fulfil a condition, or the process has
    ended.
    """
    while process.poll() is None:
        if path.exists() and condition(
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        ):
            return
        time.sleep(0.01)
