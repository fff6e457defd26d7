"""timm's way to train, for `benchmarks.gpu`: its script where there is one, else its parts in a plain loop.

    python -m benchmarks.timm_loop FOLDER --model resnet50 --batch 256 --steps 60

The loop has timm's dataset, loader, model and optimizer with the fastest settings of its script: channels-last,
bfloat16 autocast, torch.compile, the prefetcher, a worker for each core. timm's wheel has no train.py.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2

LINE = re.compile(r"Train: \d+ \[\s*(\d+)/.*?\(\s*([\d.]+)s,\s*[\d.,]+/s\)")
"""A line of timm's script: the number of a step, and the mean seconds of all steps up to it."""


def main() -> None:
    """Prints images a second as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="class folders")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--script", help="timm's train.py")
    args = parser.parse_args()
    print(json.dumps(rate_of_script(args) if args.script else rate_of_loop(args)))


def rate_of_loop(args: argparse.Namespace) -> float:
    """Images a second after the warm-up."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device.type == "cuda"
    torch.backends.cudnn.benchmark = True
    if is_cuda:
        torch.set_float32_matmul_precision("high")
    batches = batches_of(args, device)
    net: Any = timm.create_model(args.model, num_classes=num_classes(args.folder)).to(
        device, memory_format=torch.channels_last
    )
    optimizer = create_optimizer_v2(net, opt="sgd", lr=0.01, momentum=0.9, weight_decay=5e-5)
    if is_cuda:
        net = torch.compile(net)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    started = 0.0
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            synchronize(device)
            started = time.perf_counter()
        images, labels = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
            loss = loss_of(net(images.contiguous(memory_format=torch.channels_last)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(device)
    return float(args.steps * args.batch / (time.perf_counter() - started))


def batches_of(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of timm's loader, epoch after epoch."""
    dataset = create_dataset("", root=str(args.folder), split="train", is_training=True, batch_size=args.batch)
    loader = create_loader(
        dataset,
        input_size=(3, args.size, args.size),
        batch_size=args.batch,
        is_training=True,
        hflip=0.5,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        device=device,
        persistent_workers=args.workers > 0,
    )
    while True:
        yield from loader


def rate_of_script(args: argparse.Namespace) -> float:
    """Images a second of timm's script after the warm-up, from its log."""
    words = ["--data-dir", str(args.folder), "--train-split", "train", "--val-split", "", "--model", args.model]
    words += ["--num-classes", str(num_classes(args.folder)), "-b", str(args.batch), "--workers", str(args.workers)]
    words += ["--input-size", "3", str(args.size), str(args.size), "--opt", "sgd", "--lr", "0.01", "--epochs", "1"]
    words += ["--warmup-epochs", "0", "--cooldown-epochs", "0", "--log-interval", "10", "--channels-last", "--pin-mem"]
    words += ["--amp", "--amp-dtype", "bfloat16", "--torchcompile", "--color-jitter", "0", "--output", "/tmp/timm"]
    done = subprocess.run([sys.executable, args.script, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{args.script} failed:\n{done.stderr[-3000:]}")
    return rate_of_log(done.stdout + done.stderr, args.batch, args.warmup)


def rate_of_log(text: str, batch: int, warmup: int) -> float:
    """Images a second between the first line after the warm-up and the last one; the means of earlier steps go out."""
    lines = [(int(step) + 1, float(mean)) for step, mean in LINE.findall(text)]
    after = [(steps, steps * mean) for steps, mean in lines if steps > warmup]
    if len(after) < 2:
        raise SystemExit(f"timm's log has {len(after)} lines after step {warmup}, expected two or more")
    (first, began), (last, ended) = after[0], after[-1]
    return batch * (last - first) / (ended - began)


def num_classes(folder: Path) -> int:
    """The number of class folders."""
    return sum(path.is_dir() for path in folder.iterdir())


def synchronize(device: torch.device) -> None:
    """Waits for what the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
