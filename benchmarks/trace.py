"""`python -m benchmarks.trace`: processor time of the host to trace a ResNet-50 step on torch_xla.

Each way is a process of its own, because torch_xla reads its settings once: with torch_xla's functionalization, and
without it as the trainer runs; each plain and with averaged weights, in turns. XLA:CPU computes the steps, on images of
32 pixels: what a step traces does not depend on their size. Needs no shard set; minutes, most of them to compile.
"""

import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from trainer.config import ImageConfig, ModelConfig, RegularizeConfig, TrainConfig

ROUNDS = 2
STEPS = 8
"""Steps of a process that count; the first ones compile."""
WAYS = {"functionalization": "0", "without (the trainer)": "1"}
BATCH, SIZE = 2, 32


def main() -> None:
    """Prints a row for each way."""
    print("| torch_xla | averaged weights | milliseconds of each round |\n|---|---|---|")
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for decay in ("0", "0.999"):
            for way, value in WAYS.items():
                environment = os.environ | {"PJRT_DEVICE": "CPU", "XLA_DISABLE_FUNCTIONALIZATION": value}
                command = [sys.executable, "-m", "benchmarks.trace", decay]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found.setdefault((way, decay), []).append(float(done.stdout.split()[-1]))
    for (way, decay), values in found.items():
        print(f"| {way} | {'yes' if float(decay) else 'no'} | {', '.join(f'{value:.0f}' for value in values)} |")


def trace_ms(ema_decay: float) -> float:
    """Processor time of the thread that traces, in milliseconds: the median of the steps."""
    from trainer.model.learner import Learner
    from trainer.runtime.launch import running

    times: list[float] = []

    class Timed(Learner):
        def _train_step(self, batch: Any, rate: Any, weight: Any) -> torch.Tensor:
            start = time.thread_time()
            row = super()._train_step(batch, rate, weight)
            times.append(1000 * (time.thread_time() - start))
            return row

    config = TrainConfig(
        fake_data=True,
        global_batch_size=BATCH,
        model=ModelConfig(name="resnet50"),
        image=ImageConfig(size=SIZE, eval_resize=SIZE),
        regularize=RegularizeConfig(ema_decay=ema_decay, label_smoothing=0.1),
    )
    batch = {
        "image": torch.zeros(BATCH, SIZE, SIZE, 3, dtype=torch.uint8),
        "label": torch.zeros(BATCH, dtype=torch.int64),
        "weight": torch.ones(BATCH),
        "flip": torch.zeros(BATCH, dtype=torch.bool),
    }
    with running("spmd", "fp32") as spmd:
        learner = Timed(spmd, config, 1000, None)
        for step in range(STEPS + 2):
            learner.train_step(spmd.to_device(batch), 0.1 / (step + 1), step).cpu()
    return statistics.median(times[2:])


if __name__ == "__main__":
    print(trace_ms(float(sys.argv[1]))) if len(sys.argv) > 1 else main()
