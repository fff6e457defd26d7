"""The estimate of a training step's memory against measured peaks: five models on the CPU, each in its own process.

    python -m benchmarks.memory
    python -m benchmarks.memory --batch 32 --strategy single resnet50 vit_small_patch16_224

The peak is the largest resident memory while a learner is built and takes three steps, less what the process had before
(imports and the batch).
"""

import argparse
import json
import os
import subprocess
import sys

import torch

from benchmarks.environment import machine
from benchmarks.measuring import peak_bytes_of
from trainer.config import ImageConfig, ModelConfig, OptimizerConfig, RegularizeConfig, TrainConfig
from trainer.model import memory
from trainer.model.learner import Learner
from trainer.runtime.launch import running
from trainer.runtime.machine import total_memory

MODELS = ("resnet18", "resnet50", "vit_tiny_patch16_224", "convnext_atto", "efficientnet_b0")
CLASSES, STEPS = 10, 3
MIB = 1 << 20


def main() -> None:
    """Prints one table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--strategy", default="single")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure(config_of(args, args.models[0]))))
        return
    print(f"{machine()}; batch {args.batch} in {args.accumulate} passes, {args.size} pixels, {args.strategy}\n")
    print("| model | estimate (MiB) | measured peak (MiB) | estimate / peak |\n|---|---:|---:|---:|")
    for name in args.models:
        options = [f"--{key}={getattr(args, key)}" for key in ("batch", "size", "optimizer", "accumulate", "strategy")]
        words = [sys.executable, "-m", "benchmarks.memory", name, "--json", *options]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        estimate, peak = json.loads(done.splitlines()[-1])
        print(f"| {name} | {estimate / MIB:,.0f} | {peak / MIB:,.0f} | {estimate / peak:.2f} |", flush=True)


def config_of(args: argparse.Namespace, name: str) -> TrainConfig:
    """The run whose step is measured."""
    return TrainConfig(
        strategy=args.strategy,
        global_batch_size=args.batch,
        accumulate=args.accumulate,
        model=ModelConfig(name=name),
        image=ImageConfig(size=args.size, eval_resize=args.size),
        optimizer=OptimizerConfig(name=args.optimizer),
        regularize=RegularizeConfig(label_smoothing=0.1),
    )


def measure(config: TrainConfig) -> tuple[int, int]:
    """(estimate, measured peak) in bytes of a step of this run."""
    need = memory.need_of(config, CLASSES, 1)
    assert need is not None
    assert need.total < total_memory(), "this would not fit here: a smaller batch, or another model"
    batch = {
        "image": torch.zeros(config.global_batch_size, config.image.size, config.image.size, 3, dtype=torch.uint8),
        "label": torch.zeros(config.global_batch_size, dtype=torch.int64),
        "weight": torch.ones(config.global_batch_size),
    }
    with running(config.strategy, config.precision) as runtime:
        before = resident_bytes()
        learner = Learner(runtime, config, CLASSES, None)
        for step in range(STEPS):
            runtime.fetch([learner.train_step(runtime.to_device(batch), 0.01, step)])
        runtime.fetch([learner.eval_step(runtime.to_device(batch))])
        return need.total, peak_bytes_of(os.getpid()) - before


def resident_bytes() -> int:
    """The resident memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    main()
