"""timm's way to train, for `benchmarks.gpu`: its dataset, loader, model and optimizer in a plain
loop.

The fastest settings of its script: channels-last, bfloat16 autocast, torch.compile, the prefetcher,
a worker for each core. timm's wheel has no train.py.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import timm
import torch
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2


def rate(folder: str, scale: dict[str, Any]) -> float:
    """Images a second after the warm-up, from class folders, at a scale of `benchmarks.gpu`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device.type == "cuda"
    torch.backends.cudnn.benchmark = True
    if is_cuda:
        torch.set_float32_matmul_precision("high")
    batches = batches_of(folder, scale["batch"], scale["size"], device)
    net: Any = timm.create_model(scale["resnet"], num_classes=len(os.listdir(folder)))
    net = net.to(device, memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(net, opt="sgd", lr=0.01, momentum=0.9, weight_decay=5e-5)
    if is_cuda:
        net = torch.compile(net)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    started = 0.0
    for step in range(scale["warmup"] + scale["steps"]):
        if step == scale["warmup"]:
            synchronize(device)
            started = time.perf_counter()
        images, labels = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
            loss = loss_of(net(images.contiguous(memory_format=torch.channels_last)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(device)
    return scale["steps"] * scale["batch"] / (time.perf_counter() - started)


def batches_of(
    folder: str, batch: int, size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of timm's loader, epoch after epoch."""
    dataset = create_dataset("", root=folder, split="train", is_training=True, batch_size=batch)
    loader = create_loader(
        dataset, input_size=(3, size, size), batch_size=batch, is_training=True, hflip=0.5,
        num_workers=len(os.sched_getaffinity(0)), pin_memory=device.type == "cuda", device=device,
        persistent_workers=True,
    )  # fmt: skip
    while True:
        yield from loader


def synchronize(device: torch.device) -> None:
    """Waits for what the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(rate(sys.argv[1], json.loads(sys.argv[2]))))
