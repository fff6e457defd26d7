"""Measures training: with real data and `--fake-data`, and up to an accuracy.

    OMP_WAIT_POLICY=passive python -m benchmarks.train ratio --model resnet50 --size 224 \\
        --steps 3 --batch 8 --rounds 9
    OMP_WAIT_POLICY=passive python -m benchmarks.train cost --model resnet50 --size 224 \\
        --steps 3 --batch 8
    python -m benchmarks.train accuracy --strategy spmd
    OMP_WAIT_POLICY=passive python -m benchmarks.train losses --rounds 5

Real data are JPEGs of 400 x 500 pixels; the accuracy is that of the demo's digits, with another
seed in each round. `losses` is what --record-losses costs on the digits, whose steps are so short
that any cost shows. Passive waiting keeps torch's threads from spinning while other work has their
cores, which would count as processor time of a sample.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring import parser_of
from examples.demo import commands, write_digits
from tests.makers.shardset import jpeg_samples, new_set
from tests.makers.training import finish, read_records, trainer
from trainer.config import (
    ImageConfig,
    ModelConfig,
    ScheduleConfig,
    Strategy,
    TrainConfig,
)
from trainer.data.device_feed import DeviceFeed
from trainer.data.splits import NUM_CLASSES, open_data
from trainer.model.learner import Learner
from trainer.recipes import digits_smoke
from trainer.run_folder.names import log_name
from trainer.runtime.launch import running

ACCURACIES = (0.9, 0.95, 0.97)


def main() -> None:
    """Prints one table in Markdown."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["ratio", "cost", "accuracy", "losses"])
    parser.add_argument("--strategy", default="single")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.what in ("accuracy", "losses"):
            manifest = digits_set(Path(folder))
            tables_of_digits = {"accuracy": accuracy_table, "losses": losses_table}
            print(tables_of_digits[args.what](manifest, args.strategy, Path(folder), args.rounds))
            return
        tables = {"ratio": ratio_table, "cost": cost_table}
        print(tables[args.what](config_of(args, Path(folder)), Path(folder), args.rounds))


def config_of(args: argparse.Namespace, folder: Path) -> TrainConfig:
    """The run that is measured: no evaluation, because it ends in mid-epoch."""
    return TrainConfig(
        run_dir=str(folder),
        strategy=args.strategy,
        precision=args.precision,
        global_batch_size=args.batch,
        max_steps=args.steps,
        log_every_steps=1,
        model=ModelConfig(name=args.model),
        image=ImageConfig(size=args.size, eval_resize=args.size),
        schedule=ScheduleConfig(warmup_epochs=0),
    )


def ratio_table(config: TrainConfig, folder: Path, rounds: int) -> str:
    """What a sample takes with real and with fake data, in turns of `max_steps` in one process, and
    their ratios.

    Each turn of real data opens its stream anew, so that nothing was decoded while fake data
    trained. One turn of each comes first and does not count: in it the process gets its memory, a
    virtual machine perhaps from its host.
    """
    steps = config.max_steps or 1
    manifest = real_data(folder / "set", steps * config.global_batch_size)
    streams = {
        "real": open_data(replace(config, manifest=manifest), 0, 1).train,
        "fake": open_data(replace(config, fake_data=True), 0, 1).train,
    }
    rates: dict[str, list[float]] = {kind: [] for kind in streams}
    costs: dict[str, list[float]] = {kind: [] for kind in streams}
    with running("single", config.precision) as runtime:
        learner = Learner(runtime, config, NUM_CLASSES, None)
        for number in range(rounds + 1):
            for kind in kinds_of(number):
                with DeviceFeed(
                    streams[kind].run(iter([(number, range(steps))])), runtime.to_device
                ) as feed:
                    rate, cpu_ms = turn_of(learner, feed)
                if number:  # the first turns are a warm-up
                    rates[kind].append(rate)
                    costs[kind].append(cpu_ms)
            print(f"round {number} of {rounds} is done", file=sys.stderr, flush=True)
    rows = compared("samples/s", rates) + compared("CPU ms a sample", costs)
    return "\n".join([HEAD, *rows])


def kinds_of(number: int) -> tuple[str, str]:
    """Who comes first takes turns, so that a machine that gets slower or faster favours neither."""
    return ("real", "fake") if number % 2 else ("fake", "real")


def turn_of(learner: Learner, feed: DeviceFeed) -> tuple[float, float]:
    """Samples a second of all steps of a feed, as a run takes them, and the processor time of a
    sample in ms, over all threads; on a CPU each step is done when it returns.
    """
    before = time.perf_counter(), time.process_time()
    num_samples = 0
    for fed in feed:
        learner.train_step(fed.tensors, 0.0, fed.step, len(fed.real_ids))
        num_samples += len(fed.ids)
    seconds, cpu_s = time.perf_counter() - before[0], time.process_time() - before[1]
    return num_samples / seconds, 1000 * cpu_s / num_samples


HEAD = "| | of medians | each turn |\n|---|---|---|"


def compared(what: str, named: dict[str, list[float]], digits: int = 2) -> list[str]:
    """A row for each of two kinds of turns, then their ratio: of the medians, and of each pair."""
    (left, ours), (right, theirs) = named.items()
    rows = [(f"{name}, {what}", median(each), each, digits) for name, each in named.items()]
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    rows.append((f"{left} / {right}", median(ours) / median(theirs), pairs, 3))
    return [
        f"| {name} | {middle:.{digits}f} | {', '.join(f'{one:.{digits}f}' for one in each)} |"
        for name, middle, each, digits in rows
    ]


def cost_table(config: TrainConfig, folder: Path, rounds: int) -> str:
    """Processor time of a sample in the input and in the model's step, in one process: no other
    load is in it.
    """
    steps = config.max_steps or 1
    manifest = real_data(folder / "set", steps * config.global_batch_size)
    stream = open_data(replace(config, manifest=manifest), 0, 1).train
    input_ms, step_ms = [], []
    with running("single", config.precision) as runtime:
        learner = Learner(runtime, config, NUM_CLASSES, None)
        for epoch in range(rounds):
            before = time.process_time()
            batches = list(stream.run(iter([(epoch, range(steps))])))
            samples = steps * config.global_batch_size
            input_ms.append(1000 * (time.process_time() - before) / samples)
            with DeviceFeed(iter(batches), runtime.to_device) as feed:
                step_ms.append(turn_of(learner, feed)[1])
    parts = {"input": input_ms, "step": step_ms}
    return "\n".join([HEAD, *compared("CPU ms a sample", parts)])


def digits_set(folder: Path) -> str:
    """The demo's shard set."""
    raw = write_digits(folder / "raw")
    build = [sys.executable, "-m", *commands("digits", raw, folder)[0]]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    return str(folder / "shards")


def whole_run(config: TrainConfig) -> None:
    """A run in a separate process, to its end."""
    code, output = finish(trainer(config), timeout_s=1800)
    if code:
        raise SystemExit(output)


def losses_table(manifest: str, strategy: Strategy, folder: Path, rounds: int) -> str:
    """User and system time of the digits recipe with and without --record-losses, in turns, and
    their ratio.
    """
    seconds: dict[str, list[float]] = {"with losses": [], "without": []}
    for number in range(rounds):
        for kind in sorted(seconds, reverse=number % 2 == 0):
            config = replace(
                digits_smoke(), manifest=manifest, strategy=strategy,
                run_dir=str(folder / f"{kind}-{number}"), record_losses=kind == "with losses",
            )  # fmt: skip
            before = os.times()
            whole_run(config)
            after = os.times()
            seconds[kind].append(sum(after[2:4]) - sum(before[2:4]))
    return "\n".join([HEAD, *compared("CPU s", seconds, 1)])


def accuracy_table(manifest: str, strategy: Strategy, folder: Path, rounds: int) -> str:
    """The digits recipe to its end: when it first reached each accuracy, with its start and its
    compiling.
    """
    rows = []
    for seed in range(rounds):
        run_dir = folder / f"run{seed}"
        config = replace(digits_smoke(), manifest=manifest, strategy=strategy, seed=seed)
        whole_run(replace(config, run_dir=str(run_dir)))
        final, evaluated = read_records(run_dir, "final")[0], read_records(run_dir, "eval")
        reached = (f"{seconds_to(run_dir, evaluated, share):.1f}" for share in ACCURACIES)
        rows.append(
            f"| {seed} | {' | '.join(reached)} | {final['seconds']:.1f} | {final['accuracy']:.4f} |"
        )
    head = " | ".join(f"s to {share:.0%}" for share in ACCURACIES)
    return "\n".join(
        [f"| seed | {head} | s in all | accuracy |", "|---|---|---|---|---|---|", *rows]
    )


def seconds_to(run_dir: Path, evaluated: Sequence[dict[str, Any]], share: float) -> float:
    """From the first line of the log to the first evaluation of at least that accuracy; not a
    number if none was.
    """
    start = (run_dir / log_name(0)).read_text().partition(" ")[0]
    found = [one["time"] for one in evaluated if one["top1"] >= share]
    return (
        (datetime.fromisoformat(min(found)) - datetime.fromisoformat(start)).total_seconds()
        if found
        else math.nan
    )


def real_data(folder: Path, num_samples: int) -> str:
    """A shard set of ImageNet-sized JPEGs."""
    samples = jpeg_samples("train", num_samples, height=400, width=500)
    return new_set({"train": samples, "val": jpeg_samples("val", 8)}, folder)


if __name__ == "__main__":
    main()
