"""Measures the trainer on a CUDA device: rates, the share of it that the cores can feed, and memory.

    python -m benchmarks.gpu --write docs/benchmarks/gpu.md
    python -m benchmarks.gpu --parts rates feeding
    python -m benchmarks.gpu --scale tiny

Makes JPEGs of about 110 KB and shard sets of them. Each case is a process of its own; real and fake data take turns in
it, and the first turn of each does not count. `--scale tiny` runs all parts on a CPU, to test this script.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, inputs
from benchmarks.gpu_case import CLASSES, Case, Timing, repeated
from trainer.config import (
    ImageConfig,
    ModelConfig,
    OptimizerConfig,
    RegularizeConfig,
    ScheduleConfig,
    TrainConfig,
)
from trainer.data.splits import BatchSource, open_data

PACKAGES = ["torch", "timm", "numpy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of all parts. `steps` and `warmup` are those of a turn; a turn of the warm-up is not counted."""

    num_images: int
    resnet: str
    vit: str
    size: int
    batch: int
    steps: int
    warmup: int
    rounds: int


SCALES = {
    "full": Scale(num_images=20_000, resnet="resnet50", vit="vit_small_patch16_224", size=224, batch=256, steps=50,
                  warmup=10, rounds=3),
    "tiny": Scale(num_images=64, resnet="test_resnet", vit="test_vit", size=160, batch=4, steps=2,
                  warmup=1, rounds=1),
}  # fmt: skip


# --- the parts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the files of a run of this script are."""

    folder: Path
    scale: Scale

    @property
    def raw(self) -> Path:
        return self.folder / "raw"

    def manifest(self, *flags: str) -> str:
        """A shard set of the raw images, built with these flags unless an earlier part did."""
        output = self.folder / "".join(["set", *flags])
        if not (output / "manifest.json").exists():
            inputs.make("folders", self.raw, self.scale.num_images)
            words = ["build", "--source", "folder", "--input", str(self.raw / "train"), "--output", str(output)]
            words += ["--holdout", "val=0.05", "--no-report", *flags]
            call([sys.executable, "-m", "pipelines", *words])
        return str(output)

    def config(self, model: str, **changes: Any) -> TrainConfig:
        """A run on the shard set, in bfloat16 on a CUDA device."""
        base = TrainConfig(
            manifest=self.manifest(),
            run_dir=str(self.folder / "run"),
            strategy="single",
            precision="bf16" if torch.cuda.is_available() else "fp32",
            global_batch_size=self.scale.batch,
            log_every_steps=1,
            model=ModelConfig(name=model, num_classes=CLASSES),
            image=ImageConfig(size=self.scale.size, eval_resize=self.scale.size),
            schedule=ScheduleConfig(warmup_epochs=0),
            optimizer=OptimizerConfig(learning_rate=0.01),
        )
        return replace(base, **changes)

    def case(self, name: str, config: TrainConfig, *, is_real: bool = False) -> Case:
        """The case of a config, with the steps of the scale."""
        scale = self.scale
        return Case(
            name=name, config=config, is_real=is_real, steps=scale.steps, warmup=scale.warmup, rounds=scale.rounds
        )


def rates_part(place: Place) -> str:
    """Part 1: ResNet-50 with real and fake data, and timm's way on the same files."""
    timings = run_case(place.case(place.scale.resnet, place.config(place.scale.resnet), is_real=True))
    scale = place.scale
    values = {"folder": str(place.raw / "train"), "model": scale.resnet, "batch": scale.batch, "size": scale.size}
    values |= {"steps": scale.steps, "warmup": scale.warmup}
    peer = float(json.loads(call([sys.executable, "-m", "benchmarks.timm_loop", json.dumps(values)]).splitlines()[-1]))
    ratio = statistics.median(timings[-1].rates["real"]) / peer
    text = f"timm, compiled, on the same files: {peer:,.0f} images/s; the trainer's real rate is {ratio:.2f} of it."
    return f"{TIMING_HEAD}\n{timing_rows(timings)}\n\n{text}"


def feeding_part(place: Place) -> str:
    """Part 2: what the cores can read and decode, with and without restart markers."""
    rows = []
    for name, flags in (("as it is", ()), ("--jpeg-restart", ("--jpeg-restart",))):
        config = replace(place.config(place.scale.resnet), manifest=place.manifest(*flags))
        stream = open_data(config, 0, 1).train
        rates = [input_rate(stream, number, place.scale) for number in range(place.scale.rounds + 1)][1:]
        rows.append(f"| {name} | {statistics.median(rates):,.0f} | {', '.join(f'{one:,.0f}' for one in rates)} |")
    head = "Reading and decoding alone, all cores. Divide by the rate with fake data for the share that they can feed."
    return "\n".join([head, "", "| set | images/s (median) | each turn |", "|---|---:|---|", *rows])


def models_part(place: Place) -> str:
    """Part 3: ViT-S/16, and ResNet-50 with averaged weights and two passes."""
    adamw = OptimizerConfig(name="adamw", learning_rate=1e-3, weight_decay=1e-4)
    averaged = RegularizeConfig(label_smoothing=0.1, ema_decay=0.9999)
    cases = (
        place.case(place.scale.vit, place.config(place.scale.vit, optimizer=adamw)),
        place.case(
            f"{place.scale.resnet}, averages, two passes",
            place.config(place.scale.resnet, regularize=averaged, accumulate=2),
        ),
    )
    return "\n".join([TIMING_HEAD, *(timing_rows(run_case(case)) for case in cases)])


PARTS: dict[str, tuple[str, Callable[[Place], str]]] = {
    "rates": ("Real and fake data, plain and compiled", rates_part),
    "feeding": ("What the cores can feed", feeding_part),
    "models": ("Other models", models_part),
}

TIMING_HEAD = (
    "| model | compiled | fake, images/s | real, images/s | real / fake | waits for data | first step, s | peak, MiB "
    "| waits of the host | state, s |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def timing_rows(timings: Sequence[Timing]) -> str:
    """The rows of a table; a rate is the median of the turns."""
    rows = []
    for one in timings:
        rates = {kind: statistics.median(found) for kind, found in one.rates.items()}
        data = " | | "
        if "real" in rates:
            data = f"{rates['real']:,.0f} | {rates['real'] / rates['fake']:.3f} | {one.wait_percent:.1f} %"
        rows.append(
            f"| {one.name} | {'yes' if one.compile else 'no'} | {rates['fake']:,.0f} | {data} | {one.first_step_s:.1f} "
            f"| {one.peak_mib:,.0f} | {one.num_host_waits} | {one.state_s:.2f} |"
        )
    return "\n".join(rows)


def input_rate(stream: BatchSource, epoch: int, scale: Scale) -> float:
    """Images a second of a stream without a model."""
    began, num_images = 0.0, 0
    for number, (_, _, batch) in enumerate(repeated(stream, epoch, scale.warmup + scale.steps)):
        if number == scale.warmup:
            began, num_images = time.perf_counter(), 0
        num_images += len(batch["id"])
    return num_images / (time.perf_counter() - began)


# --- processes -------------------------------------------------------------------------------------------------------


def run_case(case: Case) -> list[Timing]:
    """The timings of a case, plain and compiled, from a fresh process."""
    printed = call([sys.executable, "-m", "benchmarks.gpu_case", case.to_json()])
    return [Timing(**one) for one in json.loads(printed.splitlines()[-1])]


def call(words: Sequence[str]) -> str:
    """What a command prints; its errors go to those of this script. Ends this script if it fails."""
    # Threads that spin while they wait would take the time of those that decode.
    variables = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=variables)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)[:300]} ended with code {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


# --- the page --------------------------------------------------------------------------------------------------------


def head(arguments: Sequence[str]) -> str:
    """The machine, the versions and the command."""
    device = "no CUDA device"
    if torch.cuda.is_available():
        one = torch.cuda.get_device_properties(0)
        device = f"{one.name}, {one.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    versions = ", ".join(f"{key} {value}" for key, value in environment.versions(sys.executable, PACKAGES).items())
    command = shlex.join(["python", "-m", "benchmarks.gpu", *arguments])
    return f"{environment.today()}; {device}; {versions}.\n\n```\n{command}\n```"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the parts, prints each when it is done, and writes the page."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--folder", type=Path, help="for images, sets and runs, used again; default: a temporary one")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page, part by part")
    args = parser.parse_args(given)
    if args.scale == "full" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; `--scale tiny` runs without one")
    texts = [head(given)]
    with tempfile.TemporaryDirectory(prefix="gpu-") as temporary:
        place = Place(folder=args.folder or Path(temporary), scale=SCALES[args.scale])
        print(texts[0], flush=True)
        for name in args.parts:
            title, part = PARTS[name]
            texts.append(f"### {title}\n\n{part(place)}")
            print(f"\n{texts[-1]}", flush=True)
            if args.write:
                environment.write_between(args.write, "measured", "\n\n".join(texts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
