"""The accuracy of fine-tuning over learning rates: two models and two small sets, with weights of a third set.

    python -m benchmarks.fine_tune --pictures skimage/data --stamps /usr/share/tuxpaint/stamps --folder fine-tune
    python -m benchmarks.fine_tune --pictures skimage/data --folder fine-tune --rates default 1e-3 --models resnet18
    python -m benchmarks.fine_tune --pictures skimage/data --folder fine-tune --rates default --seeds 3

The sets are a quarter of scikit-learn's digits and the stamps of Tux Paint (`apt-get install tuxpaint-stamps-default`).
The weights are trained on tiles of scikit-image's pictures, whose class is the picture (`pip download --no-deps
scikit-image`, then unzip). What is in the folder already is not measured again.
"""

import argparse
import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.environment import machine
from examples.demo import write_digits
from pipelines import cli as pipelines
from trainer import cli as trainer
from trainer.record.log_files import METRICS, records

SIZE = 32
"""Pixels of all images: the smallest that both models take."""
PICTURE_SIDE = 512
"""Pictures are resized to this side before they are cut."""
MODELS = ("resnet18", "convnext_atto")
RATES = ("1e-4", "3e-4", "1e-3", "3e-3")
DEFAULT = "default"
"""The rate that the trainer chooses."""
TESTED = {"tiles": 0.1, "digits": 0.5, "stamps": 0.5}
"""The share of each set that is for testing."""
EVERY = 4
"""Of the tiles and digits every fourth is taken."""
PRETRAIN = ["--epochs", "10", "--lr", "1e-3", "--image-size", str(SIZE)]


def main() -> None:
    """Prints one table in Markdown: a row for each set and model, a column for each rate, a number for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--stamps", type=Path, default=Path("/usr/share/tuxpaint/stamps"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=RATES, help=f"{DEFAULT} is what the trainer chooses")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, with seeds from 0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    digits = every(write_digits(args.folder / "all-digits"), args.folder / "raw-digits")
    tiles = every(write_tiles(args.pictures, args.folder / "all-tiles"), args.folder / "raw-tiles")
    for name, raw in {"tiles": tiles, "digits": digits, "stamps": args.stamps}.items():
        build(raw, args.folder / name, TESTED[name])
    columns = args.rates
    print(f"{machine()}\n\n| set | model | {' | '.join(columns)} |\n|---|---|{'---:|' * len(columns)}")
    seeds = [["--seed", str(seed)] if seed else [] for seed in range(args.seeds)]
    for model in args.models:
        weights = pretrained(args.folder, model, "tiles")
        for name in ("digits", "stamps"):
            rates = [[] if rate == DEFAULT else ["--lr", rate] for rate in columns]
            row = [[accuracy(args.folder, name, model, [*rate, *seed], weights) for seed in seeds] for rate in rates]
            cells = [", ".join(f"{one:.1%}" for one in of_rate) for of_rate in row]
            print(f"| {name} | {model} | {' | '.join(cells)} |", flush=True)


def write_tiles(pictures: Path, folder: Path) -> Path:
    """The tiles of each coloured picture in a folder, in class folders; written once."""
    if folder.exists():
        return folder
    part = folder.with_name(folder.name + ".part")
    for path in sorted([*pictures.glob("*.png"), *pictures.glob("*.jpg")]):
        with Image.open(path) as image:
            if min(image.size) < PICTURE_SIDE // 2:
                continue
            pixels = np.asarray(image.convert("RGB").resize((PICTURE_SIDE, PICTURE_SIDE)))
        cut = pixels.reshape(PICTURE_SIDE // SIZE, SIZE, PICTURE_SIDE // SIZE, SIZE, 3).swapaxes(1, 2)
        for number, tile in enumerate(cut.reshape(-1, SIZE, SIZE, 3)):
            file = part / path.stem / f"{number:04d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(tile).save(file)
    return part.rename(folder)


def every(full: Path, folder: Path) -> Path:
    """A folder with every fourth file of another one, in the same class folders; copied once."""
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        for path in sorted(full.rglob("*.png"))[::EVERY]:
            file = part / path.relative_to(full)
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, file)
        part.rename(folder)
    return folder


def build(raw: Path, shards: Path, share: float) -> None:
    """A shard set of class folders, built once."""
    options = ["--holdout", f"test={share}", "--no-report", "--resize", f"shorter={2 * SIZE}"]
    if not (shards / "manifest.json").exists():
        quietly(pipelines.main, ["build", "--source", "folder", "--input", raw, "--output", shards, *options], shards)


def pretrained(folder: Path, model: str, source: str) -> Path:
    """The weights of a model trained on a set."""
    exported = folder / f"weights-{model}-{source}"
    if not exported.exists():
        accuracy(folder, source, model, PRETRAIN)
        quietly(
            trainer.main, ["export", folder / f"{source}-{model}{''.join(PRETRAIN)}", "--output", exported], exported
        )
    return exported / "model.safetensors"


def accuracy(folder: Path, name: str, model: str, words: Sequence[str], weights: Path | None = None) -> float:
    """The accuracy at the end of a run on a set."""
    run = folder / f"{name}-{model}{''.join(words)}"
    if not (run / METRICS).exists() or not (found := finals(run)):
        start = ["--pretrained", weights] if weights else []
        common = ["train", "--manifest", folder / name, "--run-dir", run, "--model", model, "--strategy", "single"]
        quietly(trainer.main, [*common, *words, *start], run)
        found = finals(run)
    return found[-1]


def finals(run: Path) -> list[float]:
    """The accuracy that a run ended with; empty if it did not end."""
    return [one["accuracy"] for one in records((run / METRICS).read_bytes()) if one["kind"] == "final"]


def quietly(program: Callable[[list[str]], int], words: Sequence[object], log: Path) -> None:
    """Runs a program with its output in a file."""
    with open(f"{log}.log", "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        if code := program([str(word) for word in words]):
            raise SystemExit(f"exit code {code}; see {log}.log")


if __name__ == "__main__":
    main()
