"""Steps of one process for each device, and what each process takes: one of the processes of
`benchmarks.gpu`.

torchrun --nproc-per-node 8 -m benchmarks.gpu_devices CASE_JSON
"""

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_case import CLASSES, Case, turn
from shardset.stream.spec import Batch
from trainer.config import from_dict
from trainer.data.splits import BatchSource, open_data
from trainer.model.learner import Learner
from trainer.runtime.base import Runtime
from trainer.runtime.launch import started


def main() -> None:
    """Prints what each process measured, as JSON, from the first one."""
    values = json.loads(sys.argv[1])
    case = Case(**{**values, "config": from_dict(values["config"])})
    with started("ddp", case.config) as runtime:
        texts = runtime.gather_texts(json.dumps(measure(case, runtime)))
        if runtime.is_master:
            print(json.dumps([json.loads(text) for text in texts]))


def measure(case: Case, runtime: Runtime) -> dict[str, Any]:
    """The images a second of this process in each turn, the devices that it has a context on, and
    its decoders.
    """
    stream: Any = Counting(open_data(case.config, runtime.host, runtime.num_hosts).train)
    learner = Learner(runtime, case.config, CLASSES, None)
    steps = case.warmup + case.steps
    rates = [
        turn(learner, runtime, stream, number, num_steps=steps, warmup=case.warmup)[0]
        for number in range(case.rounds + 1)
    ]
    runtime.sum_hosts([0])  # all have taken their steps: the contexts that they open are there
    return {"rates": rates[1:], "decoders": stream.decoders, "contexts": contexts()}


class Counting:
    """A stream that counts the threads that decode for it."""

    def __init__(self, stream: BatchSource) -> None:
        self._stream, self.stop, self.decoders = stream, stream.stop, 0

    def __len__(self) -> int:
        return len(self._stream)

    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[tuple[int, int, Batch]]:
        """The batches of the stream."""
        for batch in self._stream.run(spans):
            names = [thread.name for thread in threading.enumerate()]
            self.decoders = max(
                self.decoders, sum(name.startswith("shardset-decode") for name in names)
            )
            yield batch


def contexts() -> list[int]:
    """The CUDA devices on which this process has a context, each of which takes about half a
    gigabyte.
    """
    # Asking by other functions would open one.
    return [
        number
        for number in range(torch.cuda.device_count())
        if torch._C._cuda_hasPrimaryContext(number)
    ]


if __name__ == "__main__":
    main()
