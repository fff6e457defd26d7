"""Kills a run again and again: `python -m tests.makers.kills NUM_KILLS SEED CONFIG_JSON`, then lets it finish.

Each life is a fork of one process that has imported everything, so that a kill costs a second and not ten. A life ends
by SIGKILL a random time after its first or second step, wherever it is then: in a step, an evaluation, a checkpoint.
Each step leaves a line in `ids.jsonl`: its number and the ids of its samples.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainer import config as configs
from trainer import loop, runtime
from trainer.config import TrainConfig
from trainer.feed import Fed
from trainer.metrics import METRICS
from trainer.run import Run

IDS = "ids.jsonl"


def main(num_kills: int, seed: int, config: TrainConfig) -> None:
    """Prints how many lives were killed; the others ended by themselves."""
    draw = random.Random(seed)
    Run.learn = _told(Run.learn, Path(config.run_dir) / IDS)  # type: ignore[method-assign]
    ends = [_life(config, draw.randint(1, 2), draw.uniform(0.0, 0.03)) for _ in range(num_kills)]
    print(f"killed {ends.count(-signal.SIGKILL)} of {num_kills} lives", flush=True)
    runtime.launch(config, loop.train)


def _life(config: TrainConfig, num_steps: int, seconds: float) -> int:
    metrics = Path(config.run_dir) / METRICS
    stop = _num_lines(metrics) + num_steps
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        runtime.launch(config, loop.train)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if _num_lines(metrics) >= stop:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.002)
    return 0


def _told(learn: Callable[[Run, Fed], None], path: Path) -> Callable[[Run, Fed], None]:
    def learn_and_tell(run: Run, fed: Fed) -> None:
        with path.open("a") as file:
            file.write(json.dumps([run.done, fed.ids[fed.weights > 0].tolist()]) + "\n")
        learn(run, fed)

    return learn_and_tell


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), configs.from_dict(json.loads(sys.argv[3])))
