"""Steps of one model: a process of `benchmarks.gpu`.

    python -m benchmarks.gpu_case CASE_JSON
    torchrun --nproc-per-node 8 -m benchmarks.gpu_case CASE_JSON

Alone it times them plain and compiled; under torchrun it measures what each process takes.
"""

import gc
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.train import kinds_of
from shardset.stream.batch import Batch
from trainer.config import TrainConfig, from_dict, to_dict
from trainer.data.device_feed import DeviceFeed
from trainer.data.splits import BatchSource, open_data
from trainer.model.learner import Learner
from trainer.runtime.base import Runtime
from trainer.runtime.launch import started
from trainer.runtime.single import Single

CLASSES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model whose steps are timed: `rounds` turns of `steps` after `warmup` steps; a first turn does not count.

    Fake data and, with `is_real`, the shard set of the config take turns.
    """

    name: str
    config: TrainConfig
    is_real: bool
    steps: int
    warmup: int
    rounds: int

    def to_json(self) -> str:
        """The case as an argument of this module."""
        values = {name: getattr(self, name) for name in ("name", "is_real", "steps", "warmup", "rounds")}
        return json.dumps({**values, "config": to_dict(self.config)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Steps of a case. `rates` are images a second of each turn, by kind of data.

    `num_host_waits` is how often the host waited for the device in the steps of a turn, and `state_s` how long a
    checkpoint stops the run.
    """

    name: str
    compile: bool
    rates: dict[str, list[float]]
    wait_percent: float
    first_step_s: float
    peak_mib: float
    num_host_waits: int
    state_s: float


def main() -> None:
    """Prints what was measured as JSON: a timing plain and one compiled, or what each process takes."""
    values = json.loads(sys.argv[1])
    case = Case(**{**values, "config": from_dict(values["config"])})
    if not torch.cuda.is_available():
        Single.compile_backend = "aot_eager"  # makes no kernels, which would need a C++ compiler
    with started(case.config.strategy, case.config) as runtime:
        if case.config.strategy == "single":
            print(json.dumps([asdict(measure(case, runtime, compile=compile)) for compile in (False, True)]))
            return
        texts = runtime.gather_texts(json.dumps(measure_process(case, runtime)))
        if runtime.is_master:
            print(json.dumps([json.loads(text) for text in texts]))


def measure(case: Case, runtime: Runtime, *, compile: bool) -> Timing:
    """One learner, its turns, and what it needs besides time."""
    config = replace(case.config, compile=compile)
    streams = {"fake": open_data(replace(config, manifest=None, fake_data=True), runtime.host, runtime.num_hosts).train}
    if case.is_real:
        streams["real"] = open_data(config, runtime.host, runtime.num_hosts).train
    gc.collect()  # what earlier learners had
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    learner = Learner(runtime, config, CLASSES, None)
    began = time.perf_counter()
    turn(learner, runtime, streams["fake"], 0, num_steps=1)
    first_step_s = time.perf_counter() - began
    rates: dict[str, list[float]] = {kind: [] for kind in streams}
    waits = []
    for number in range(case.rounds + 1):
        for kind in (one for one in kinds_of(number) if one in streams):
            steps = case.warmup + case.steps
            rate, wait = turn(learner, runtime, streams[kind], number, num_steps=steps, warmup=case.warmup)
            if number:
                rates[kind].append(rate)
                waits += [wait] * (kind == "real" or not case.is_real)
    num_host_waits = host_waits(lambda: turn(learner, runtime, streams["fake"], 0, num_steps=case.steps))
    began = time.perf_counter()
    learner.state()
    state_s = time.perf_counter() - began
    return Timing(
        name=case.name,
        compile=compile,
        rates=rates,
        wait_percent=100 * statistics.median(waits),
        first_step_s=first_step_s,
        peak_mib=torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0,
        num_host_waits=num_host_waits,
        state_s=state_s,
    )


def turn(
    learner: Learner, runtime: Runtime, stream: BatchSource, epoch: int, *, num_steps: int, warmup: int = 0
) -> tuple[float, float]:
    """(images a second, share of the time that was spent waiting for data) of the steps after the warm-up."""
    rows: list[torch.Tensor] = []
    began, waited, num_images = time.perf_counter(), 0.0, 0
    with DeviceFeed(repeated(stream, epoch, num_steps), runtime.to_device, stream.stop) as feed:
        for number, fed in enumerate(feed):
            if number == warmup and rows:
                runtime.fetch(rows)
                rows, began, waited, num_images = [], time.perf_counter(), feed.wait_s, 0
            rows.append(learner.train_step(fed.tensors, 1e-4, number, weight=float(fed.weights.sum())))
            num_images += len(fed.ids)
        runtime.fetch(rows)
        seconds = time.perf_counter() - began
    return num_images / seconds, (feed.wait_s - waited) / seconds


def repeated(stream: BatchSource, epoch: int, num_steps: int) -> Iterator[tuple[int, int, Batch]]:
    """So many steps of a stream, in epochs that no other call with another `epoch` has."""
    whole, rest = divmod(num_steps, len(stream))
    spans = [(1000 * epoch + number, range(len(stream))) for number in range(whole)]
    return stream.run(iter([*spans, (1000 * epoch + whole, range(rest))]))


def host_waits(call: Callable[[], object]) -> int:
    """How often torch says that the host waited for the device, but for the fetch at the end."""
    if not torch.cuda.is_available():
        call()
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return max(0, sum("synchroniz" in str(one.message) for one in caught) - 1)


def measure_process(case: Case, runtime: Runtime) -> dict[str, Any]:
    """The images a second of this process in each turn, the devices that it has a context on, and its decoders."""
    stream: Any = Counting(open_data(case.config, runtime.host, runtime.num_hosts).train)
    learner = Learner(runtime, case.config, CLASSES, None)
    steps = case.warmup + case.steps
    rates = [
        turn(learner, runtime, stream, number, num_steps=steps, warmup=case.warmup)[0]
        for number in range(case.rounds + 1)
    ]
    runtime.sum_hosts([0])  # all have taken their steps: the contexts that they open are there
    return {"rates": rates[1:], "decoders": stream.decoders, "contexts": contexts(), "used_mib": used_mib()}


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
            self.decoders = max(self.decoders, sum(name.startswith("shardset-decode") for name in names))
            yield batch


def contexts() -> list[int]:
    """The CUDA devices on which this process has a context, each of which takes about half a gigabyte."""
    # Asking by other functions would open one.
    return [number for number in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(number)]


def used_mib() -> list[int]:
    """The memory in use on each device of the machine, by all processes, as the driver says; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()]


if __name__ == "__main__":
    main()
