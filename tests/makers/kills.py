"""Kills a run again and again: `python -m tests.makers.kills NUM_KILLS SEED CONFIG_JSON`, then lets
it finish.

Each life is a fork of one process that has imported everything, so that a kill costs a second and
not ten. A life ends by SIGKILL a random time after its first or second step, wherever it is then:
in a step, an evaluation, a checkpoint. What the trainer is given is a model, `MODEL`, that tells
what it is trained on: each step leaves a line in the file that the environment names by `TOLD`, the
step's number and a digest of its images.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from trainer import config as configs
from trainer import loop
from trainer.config import TrainConfig
from trainer.model.build import tiny_resnet
from trainer.record.run_folder import METRICS
from trainer.runtime.launch import launch

MODEL = "tests.makers.kills:telling_model"
TOLD = "TESTS_TOLD"


def main(num_kills: int, seed: int, config: TrainConfig) -> None:
    """Prints how many lives were killed; the others ended by themselves."""
    draw = random.Random(seed)
    ends = [_life(config, draw.randint(1, 2), draw.uniform(0.0, 0.03)) for _ in range(num_kills)]
    print(f"killed {ends.count(-signal.SIGKILL)} of {num_kills} lives", flush=True)
    launch(config, loop.train)


def telling_model(num_classes: int) -> nn.Module:
    """A small net; its step is a buffer, so a checkpoint that is not that of its position tells
    other digests.
    """
    return _Telling(tiny_resnet(num_classes))


class _Telling(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        if self.training:
            with Path(os.environ[TOLD]).open("a") as file:
                file.write(json.dumps([int(self.step), digest_of(images_NCHW)]) + "\n")
            self.step += 1
        return self.net(images_NCHW)


def digest_of(images_NCHW: torch.Tensor) -> str:
    """Of the images of a batch as a model gets them."""
    return hashlib.sha256(images_NCHW.contiguous().numpy().tobytes()).hexdigest()


def told(path: Path) -> list[tuple[int, str]]:
    """The steps that a run took, with their digests, in the order in which it took them."""
    return [(step, digest) for step, digest in map(json.loads, path.read_text().splitlines())]


def _life(config: TrainConfig, num_steps: int, seconds: float) -> int:
    metrics = Path(config.run_dir) / METRICS
    stop = _num_lines(metrics) + num_steps
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        launch(config, loop.train)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if _num_lines(metrics) >= stop:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.002)
    return 0


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), configs.from_dict(json.loads(sys.argv[3])))
