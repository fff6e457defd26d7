"""Training with real data against `--fake-data`, and over 1, 2 and 4 devices or processes.

    python -m benchmarks.train ratio --model resnet50 --size 224 --steps 12 --batch 16
    python -m benchmarks.train scaling --strategy spmd --model resnet18 --size 32 --steps 30 --batch 64

Real data are JPEGs of 400 x 500 pixels. Every run is a process of its own; rates are those that the run logs, without
compiling. On a machine whose devices share the same cores, scaling says what sharing costs and nothing about a pod.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from shardset.storage import open_storage
from tests.makers.shardset import jpeg_samples, write_shard_set
from tests.makers.training import finish, read_records, trainer
from trainer.config import ImageConfig, ModelConfig, ScheduleConfig, TrainConfig

WORLDS = (1, 2, 4)


def main() -> None:
    """Prints one table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ratio", "scaling"])
    parser.add_argument("--strategy", default="single")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args, Path(folder))
        print(
            ratio_table(config, Path(folder), args.rounds)
            if args.what == "ratio"
            else scaling_table(config, Path(folder), args.rounds)
        )


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
    """Samples a second with real and with fake data, alternating, and their ratio."""
    manifest = real_data(folder / "set", (config.max_steps or 0) * config.global_batch_size + 1)
    real, fake = replace(config, manifest=manifest), replace(config, fake_data=True)
    runs = [(rate(real, folder / f"real{n}"), rate(fake, folder / f"fake{n}")) for n in range(rounds)]
    left, right = (statistics.median(rates) for rates in zip(*runs, strict=True))
    return (
        "| data | samples/s (median) | each run |\n|---|---|---|\n"
        f"| real | {left:.2f} | {', '.join(f'{run[0]:.2f}' for run in runs)} |\n"
        f"| fake | {right:.2f} | {', '.join(f'{run[1]:.2f}' for run in runs)} |\n\nratio {left / right:.3f}"
    )


def scaling_table(config: TrainConfig, folder: Path, rounds: int) -> str:
    """Samples a second over 1, 2 and 4 devices (spmd) or processes (ddp) of the same global batch."""
    fake = replace(config, fake_data=True)
    rates = {
        world: statistics.median(rate(fake, folder / f"{world}-{n}", world) for n in range(rounds)) for world in WORLDS
    }
    rows = [
        f"| {world} | {value:.1f} | {value / rates[1]:.2f} | {value / rates[1] / world:.0%} |"
        for world, value in rates.items()
    ]
    return "\n".join(["| devices | samples/s | speed-up | efficiency |", "|---|---|---|---|", *rows])


def real_data(folder: Path, num_samples: int) -> str:
    """A shard set of ImageNet-sized JPEGs."""
    samples = jpeg_samples("train", num_samples, height=400, width=500)
    write_shard_set(open_storage(str(folder)), {"train": samples, "val": jpeg_samples("val", 8)})
    return str(folder)


def rate(config: TrainConfig, folder: Path, world: int = 1) -> float:
    """Samples a second of all processes in one run."""
    how = {"processes": world} if config.strategy == "ddp" else {"devices": world}
    environment = {"OMP_NUM_THREADS": "2"} if world == 1 else {}
    code, output = finish(trainer(replace(config, run_dir=str(folder)), environment=environment, **how), timeout_s=1800)
    if code:
        raise SystemExit(output)
    return read_records(folder, "final")[0]["reduced_global_rate"]


if __name__ == "__main__":
    main()
