"""Steps of one model, timed plain and in each mode of torch.compile: a process of `benchmarks.gpu`.

python -m benchmarks.gpu_case CASE_JSON
"""

import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import _inductor as inductor

from benchmarks.train import kinds_of
from shardset.stream.spec import Batch
from trainer.config import TrainConfig, from_dict, to_dict
from trainer.data.device_feed import DeviceFeed
from trainer.data.splits import BatchSource, open_data
from trainer.model.learner import Learner
from trainer.runtime.base import Runtime, Single
from trainer.runtime.launch import started

CLASSES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model whose steps are timed: `rounds` turns of `steps` after `warmup` steps; a first turn
    does not count.

    Fake data and, with `is_real`, the shard set of the config take turns. `modes` are those of
    torch.compile: `reduce-overhead` records CUDA graphs.
    """

    name: str
    config: TrainConfig
    is_real: bool
    modes: Sequence[str] = ("default",)
    steps: int
    warmup: int
    rounds: int

    def to_json(self) -> str:
        """The case as an argument of this module."""
        values = {
            name: getattr(self, name)
            for name in ("name", "is_real", "modes", "steps", "warmup", "rounds")
        }
        return json.dumps({**values, "config": to_dict(self.config)})


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
    """Prints the timings as JSON."""
    values = json.loads(sys.argv[1])
    case = Case(**{**values, "config": from_dict(values["config"])})
    if not torch.cuda.is_available():
        Single.compile_backend = "aot_eager"  # makes no kernels, which would need a C++ compiler
    with started(case.config.strategy, case.config) as runtime:
        timings = [measure(case, runtime, "no")]
        for mode in case.modes:
            torch.compiler.reset()  # what an earlier mode compiled
            with inductor.config.patch(inductor.list_mode_options(mode)):
                timings.append(measure(case, runtime, mode))
        print(json.dumps([asdict(one) for one in timings]))


def measure(case: Case, runtime: Runtime, mode: str) -> Timing:
    """One learner, its turns, and what it needs besides time."""
    config = replace(case.config, compile=mode != "no")
    streams = {
        "fake": (
            open_data(
                replace(config, manifest=None, fake_data=True), runtime.host, runtime.num_hosts
            ).train
        )
    }
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
            rate, wait = turn(
                learner, runtime, streams[kind], number, num_steps=steps, warmup=case.warmup
            )
            if number:
                rates[kind].append(rate)
                waits += [wait] * (kind == "real" or not case.is_real)
    num_host_waits = host_waits(
        lambda: turn(learner, runtime, streams["fake"], 0, num_steps=case.steps)
    )
    began = time.perf_counter()
    learner.state()
    state_s = time.perf_counter() - began
    return Timing(
        name=case.name,
        mode=mode,
        rates=rates,
        wait_percent=100 * statistics.median(waits),
        first_step_s=first_step_s,
        peak_mib=torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0,
        num_host_waits=num_host_waits,
        state_s=state_s,
    )


def turn(
    learner: Learner,
    runtime: Runtime,
    stream: BatchSource,
    epoch: int,
    *,
    num_steps: int,
    warmup: int = 0,
) -> tuple[float, float]:
    """(images a second, share of the time that was spent waiting for data) of the steps after the
    warm-up.
    """
    rows: list[torch.Tensor] = []
    began, waited, num_images = time.perf_counter(), 0.0, 0
    with DeviceFeed(repeated(stream, epoch, num_steps), runtime.to_device, stream.stop) as feed:
        for number, fed in enumerate(feed):
            if number == warmup and rows:
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
