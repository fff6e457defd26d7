"""Steps of one model, timed plain and in each mode of torch.compile: a process of `benchmarks.gpu`,
or, with strategy `ddp`, one of its processes for each device.

python -m benchmarks.gpu_case CASE_JSON
torchrun --nproc-per-node 8 -m benchmarks.gpu_case CASE_JSON
"""

import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import torch
from torch import _inductor as inductor

from benchmarks.train import kinds_of
from shardset.stream.spec import Batch
from trainer.config import TrainConfig
from trainer.data.device_feed import DeviceFeed
from trainer.data.epochs import BatchSource
from trainer.data.splits import open_data
from trainer.model.learner import Learner
from trainer.runtime.base import Runtime, Single
from trainer.runtime.launch import started

CLASSES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of all cases: `rounds` turns of `steps` after `warmup` steps, and a first turn that
    does not count.
    """

    num_images: int
    resnet: str
    vit: str
    size: int
    batch: int
    steps: int
    warmup: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model whose steps are timed.

    Fake data and, with `is_real`, the shard set of the config take turns. `modes` are those of
    torch.compile: `reduce-overhead` records CUDA graphs.
    """

    name: str
    config: TrainConfig
    is_real: bool
    modes: Sequence[str]
    scale: Scale

    def to_json(self) -> str:
        """The case as an argument of this module."""
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Steps of a case.

    `rates` are images a second of each turn, by kind of data; `mode` is "no" if not compiled.

    `num_host_waits` is how often the host waited for the device in the steps of a turn, and
    `state_s` how long a checkpoint stops the run.
    """

    name: str
    mode: str
    rates: dict[str, list[float]]
    wait_percent: float
    first_step_s: float
    peak_mib: float
    num_host_waits: int
    state_s: float


def main() -> None:
    """Prints what was measured as JSON: the timings, or what each process of `ddp` found."""
    case = msgspec.json.decode(sys.argv[1], type=Case)
    if not torch.cuda.is_available():
        Single.compile_backend = "aot_eager"  # makes no kernels, which would need a C++ compiler
    with started(case.config.strategy, case.config) as runtime:
        if case.config.strategy == "ddp":
            measured = list[Any]([None]) * runtime.num_hosts
            torch.distributed.all_gather_object(measured, of_one_process(case, runtime))
            if runtime.is_master:
                print(json.dumps(measured))
            return
        timings = [measure(case, runtime, "no")]
        for mode in case.modes:
            torch.compiler.reset()  # what an earlier mode compiled
            with inductor.config.patch(inductor.list_mode_options(mode)):
                timings.append(measure(case, runtime, mode))
        print(json.dumps([asdict(one) for one in timings]))


def of_one_process(case: Case, runtime: Runtime) -> dict[str, Any]:
    """The images a second of this process in each turn, the devices that it has a context on, and
    its decoders.
    """
    stream: Any = open_data(case.config, runtime.host, runtime.num_hosts).train
    learner = Learner(runtime, case.config, CLASSES, None)
    rates = [
        turn(learner, runtime, stream, number, case.scale)[0]
        for number in range(case.scale.rounds + 1)
    ]
    runtime.sum_hosts([0])  # all have taken their steps: the contexts that they open are there
    decoders = stream.spec.num_decode_threads
    return {"rates": rates[1:], "decoders": decoders, "contexts": contexts()}


def contexts() -> list[int]:
    """The CUDA devices on which this process has a context, each of which takes about half a
    gigabyte.
    """
    # Asking by other functions would open one.
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # in no stub
    return [number for number in range(torch.cuda.device_count()) if has_context(number)]


def measure(case: Case, runtime: Runtime, mode: str) -> Timing:
    """One learner, its turns, and what it needs besides time."""
    config = replace(case.config, compile=mode != "no")
    configs = {"fake": replace(config, manifest=None, fake_data=True)}
    if case.is_real:
        configs["real"] = config
    streams = {
        kind: open_data(one, runtime.host, runtime.num_hosts).train for kind, one in configs.items()
    }
    gc.collect()  # what earlier learners had
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    learner = Learner(runtime, config, CLASSES, None)
    began = time.perf_counter()
    turn(learner, runtime, streams["fake"], 0, replace(case.scale, steps=1, warmup=0))
    first_step_s = time.perf_counter() - began
    rates: dict[str, list[float]] = {kind: [] for kind in streams}
    waits: dict[str, list[float]] = {kind: [] for kind in streams}
    for number in range(case.scale.rounds + 1):
        for kind in (one for one in kinds_of(number) if one in streams):
            rate, wait = turn(learner, runtime, streams[kind], number, case.scale)
            if number:
                rates[kind].append(rate)
                waits[kind].append(wait)
    unwarmed = replace(case.scale, warmup=0)
    num_host_waits = host_waits(lambda: turn(learner, runtime, streams["fake"], 0, unwarmed))
    began = time.perf_counter()
    learner.state()
    state_s = time.perf_counter() - began
    return Timing(
        name=case.name,
        mode=mode,
        rates=rates,
        wait_percent=100 * statistics.median(waits["real" if case.is_real else "fake"]),
        first_step_s=first_step_s,
        peak_mib=torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0,
        num_host_waits=num_host_waits,
        state_s=state_s,
    )


def turn(
    learner: Learner, runtime: Runtime, stream: BatchSource, epoch: int, scale: Scale
) -> tuple[float, float]:
    """(images a second, share of the time that was spent waiting for data) of the steps after the
    warm-up.
    """
    rows: list[torch.Tensor] = []
    began, waited, num_images = time.perf_counter(), 0.0, 0
    batches = repeated(stream, epoch, scale.warmup + scale.steps)
    with DeviceFeed(batches, runtime.to_device, stream.stop) as feed:
        for number, fed in enumerate(feed):
            if number == scale.warmup and rows:
                runtime.fetch(rows)
                rows, began, waited, num_images = [], time.perf_counter(), feed.wait_s, 0
            torch.compiler.cudagraph_mark_step_begin()
            rows.append(
                learner.train_step(fed.tensors, 1e-4, number, weight=float(fed.weights.sum()))
            )
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


if __name__ == "__main__":
    main()
