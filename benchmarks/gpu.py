"""Measures the trainer on a CUDA device: rates and memory, beside timm's loop.

    python -m benchmarks.gpu --write docs/dev/benchmarks/gpu.md
    python -m benchmarks.gpu --scale tiny

Makes JPEGs of about 110 KB and a shard set of them. Each case is a separate process; real and
fake data take turns in it, and the first turn of each does not count. `--scale tiny` runs all of it
on a CPU, to test this script.
"""

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import environment, inputs
from benchmarks.gpu_case import Case, Scale, Timing
from benchmarks.measuring import in_process, parser_of
from trainer.config import (
    ImageConfig,
    ModelConfig,
    OptimizerConfig,
    RegularizeConfig,
    ScheduleConfig,
    TrainConfig,
)

PACKAGES = ["torch", "timm", "numpy"]

MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
"""The modes of torch.compile; the second and the last record CUDA graphs."""

SCALES = {
    "full": Scale(
        num_images=20_000,
        resnet="resnet50",
        vit="vit_small_patch16_224",
        size=224,
        batch=256,
        steps=50,
        warmup=10,
        rounds=3,
    ),
    "tiny": Scale(
        num_images=64,
        resnet="test_resnet",
        vit="test_vit",
        size=160,
        batch=4,
        steps=2,
        warmup=1,
        rounds=1,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the files of a run of this script are."""

    folder: Path
    scale: Scale

    @property
    def raw(self) -> Path:
        """The class folders."""
        return self.folder / "raw" / "train"

    def manifest(self) -> str:
        """A shard set of the raw images, built unless an earlier call did."""
        output = self.folder / "set"
        if not (output / "manifest.json").exists():
            inputs.make("folders", self.raw.parent, self.scale.num_images)
            words = f"--source folder --input {self.raw} --output {output} --holdout val=0.05"
            build = [sys.executable, "-m", "pipelines", "build", *words.split(), "--no-report"]
            subprocess.run(build, check=True, stdout=sys.stderr)
        return str(output)

    def case(
        self,
        model: str,
        note: str = "",
        *,
        is_real: bool = False,
        modes: Sequence[str] = ("default",),
        **changes: Any,
    ) -> Case:
        """A model on the shard set, in bfloat16 on a CUDA device, with the steps of the scale."""
        scale = self.scale
        config = TrainConfig(
            manifest=self.manifest(),
            run_dir=str(self.folder / "run"),
            strategy="single",
            precision="bf16" if torch.cuda.is_available() else "fp32",
            global_batch_size=scale.batch,
            log_every_steps=1,
            model=ModelConfig(name=model),
            image=ImageConfig(size=scale.size, eval_resize=scale.size),
            schedule=ScheduleConfig(warmup_epochs=0),
            optimizer=OptimizerConfig(learning_rate=0.01),
        )
        return Case(
            name=model + note, config=replace(config, **changes), is_real=is_real, modes=modes,
            scale=scale,
        )  # fmt: skip


def cases(place: Place) -> list[Case]:
    """ResNet-50 with real and fake data, ViT-S/16, and ResNet-50 with averaged weights and two
    passes.

    The first two in all modes of torch.compile too, and at a small batch, where CUDA graphs may
    save most.
    """
    adamw = OptimizerConfig(name="adamw", learning_rate=1e-3, weight_decay=1e-4)
    averaged = RegularizeConfig(label_smoothing=0.1, ema_decay=0.9999)
    scale = place.scale
    small = scale.batch // 4
    return [
        place.case(scale.resnet, is_real=True, modes=MODES),
        place.case(scale.vit, modes=MODES, optimizer=adamw),
        place.case(
            scale.vit, ", small batch", modes=MODES, optimizer=adamw, global_batch_size=small
        ),
        place.case(scale.resnet, ", averages, two passes", regularize=averaged, accumulate=2),
    ]


def run_case(case: Case) -> list[Timing]:
    """The timings of a case, plain and in each mode, from a fresh process."""
    return [Timing(**one) for one in in_process("benchmarks.gpu_case", case.to_json())]


def rate_of_timm(place: Place) -> float:
    """Images a second of timm's way on the same files, in a fresh process."""
    scale = msgspec.json.encode(place.scale).decode()
    return float(in_process("benchmarks.timm_loop", str(place.raw), scale))


def devices_row(place: Place, number: int) -> str:
    """The row of one process for each of so many devices: what all read, and what each opens and
    decodes with.
    """
    case = place.case(
        place.scale.resnet,
        is_real=True,
        strategy="ddp",
        global_batch_size=number * place.scale.batch,
    )
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    found = in_process(*launcher, "-m", "benchmarks.gpu_case", case.to_json())
    rate = sum(statistics.median(one["rates"]) for one in found)
    contexts = "; ".join(",".join(map(str, one["contexts"])) or "none" for one in found)
    decoders = ", ".join(str(one["decoders"]) for one in found)
    return f"| {number} | {rate:,.0f} | {rate / number:,.0f} | {decoders} | {contexts} |"


HEAD = (
    "| model | compiled | fake, images/s | real, images/s | real / fake | waits for data | first"
    " step, s | peak, MiB | waits of the host | state, s"
    " |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


DEVICES_HEAD = (
    "\nEach process has a context on its own device only, and decodes in its share of the"
    " cores.\n\n| processes | images/s of all | of a process | decoders of each | contexts of each,"
    " by device |\n|---:|---:|---:|---|---|"
)


def row(one: Timing) -> str:
    """A row of the table; a rate is the median of the turns."""
    rates = {kind: statistics.median(found) for kind, found in one.rates.items()}
    data = " | | "
    if "real" in rates:
        data = (
            f"{rates['real']:,.0f} | {rates['real'] / rates['fake']:.3f} | {one.wait_percent:.1f} %"
        )
    return (
        f"| {one.name} | {one.mode} | {rates['fake']:,.0f} | {data} | {one.first_step_s:.1f} "
        f"| {one.peak_mib:,.0f} | {one.num_host_waits} | {one.state_s:.2f} |"
    )


def facts(arguments: Sequence[str]) -> str:
    """The machine, the versions and the command."""
    device = "no CUDA device"
    if torch.cuda.is_available():
        one = torch.cuda.get_device_properties(0)
        device = f"{one.name}, {one.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    versions = ", ".join(
        f"{key} {value}" for key, value in environment.versions(sys.executable, PACKAGES).items()
    )
    command = shlex.join(["python", "-m", "benchmarks.gpu", *arguments])
    return f"{environment.today()}; {device}; {versions}.\n\n```\n{command}\n```\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all cases, prints each when it is done, and writes the page."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of(__doc__)
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument(
        "--folder",
        type=Path,
        help="for images, sets and runs, used again; default: a temporary one",
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    args = parser.parse_args(given)
    if args.scale == "full" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; `--scale tiny` runs without one")
    # Threads that spin while they wait would take the time of those that decode.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    lines = [facts(given), HEAD]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as temporary:
        place = Place(folder=args.folder or Path(temporary), scale=SCALES[args.scale])
        timings = []
        for case in cases(place):
            found = run_case(case)
            timings += found
            lines += [row(one) for one in found]
            print("\n".join(lines[-len(found) :]), flush=True)
        lines.append(DEVICES_HEAD)
        lines += [
            devices_row(place, number) for number in sorted({1, torch.cuda.device_count() or 2})
        ]
        print("\n".join(lines[-3:]), flush=True)
        peer = rate_of_timm(place)
    ratio = statistics.median(timings[1].rates["real"]) / peer
    lines.append(
        f"\ntimm, compiled, on the same files: {peer:,.0f} images/s; the trainer's real rate is"
        f" {ratio:.2f} of it."
    )
    print(lines[-1], flush=True)
    if args.write:
        environment.write_between(args.write, "measured", "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
