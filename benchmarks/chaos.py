"""A pod whose hosts are lost and come back: is every sample still in exactly one global batch of an epoch?

python -m benchmarks.chaos [--readers 40] [--lives 10] [--samples 6000] [--batch 240] [--epochs 2] [--seed 1]

Up to `--readers` processes stream one shard set from a GCS emulator. In each life of the run their number is another:
all, then one less, then any; most do not divide the batch. A life ends at a random moment, also while it starts: its
readers are killed, as a lost host ends a training, and the next life goes on from the last state that the run recorded
in the bucket. What was read after that state counts no more, as after a checkpoint. Every sample's key and bytes are
compared with what was stored.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from benchmarks import environment
from shardset.format.manifest import load
from shardset.order.epoch import Order
from shardset.order.state import OrderState, state_from_json
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream, order_options
from tests.conftest import BUCKET, emulator
from tests.makers.shardset import png_samples, put, write_shard_set

SPLIT, SEED, STATE = "train", 7, "run/state.json"
MAX_STEPS_A_LIFE = 6
RECORDED_EVERY = 3

Step = tuple[int, int]
"""(epoch, step)."""


class NotExactlyOnce(AssertionError):
    """Readers together did not read what the order says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What all readers of a run have in common. The set lies at `url` in the emulator at `server`."""

    server: str
    url: str
    batch: int
    epochs: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one reader gives for a step; `contents` are the CRC32 of each sample's key and bytes."""

    rank: int
    step: Step
    ids: np.ndarray
    weights: np.ndarray
    contents: list[int]
    state_after: str


@dataclass(slots=True)
class Outcome:
    """Lives by their number of readers, and steps by what became of them."""

    worlds: list[int] = field(default_factory=list)
    num_recorded: int = 0
    num_lost: int = 0
    num_samples: int = 0

    def __str__(self) -> str:
        return (
            f"{len(self.worlds)} lives of {', '.join(map(str, self.worlds))} readers; {self.num_recorded} steps "
            f"recorded, {self.num_lost} read and lost; {self.num_samples:,} samples, each once an epoch"
        )


def read(pod: Pod, rank: int, world_size: int, state: str | None, out: Connection) -> None:
    """One reader: sends its part of each step from a state to the end of the run."""
    os.environ["STORAGE_EMULATOR_HOST"] = pod.server
    saved = state_from_json(state) if state else None
    stream = Stream(
        pod.url, SPLIT, global_batch_size=pod.batch, rank=rank, world_size=world_size, seed=SEED, image=None,
        fields=("png",), with_key=True, num_threads=1, **(order_options(saved) if saved else {}),
    )  # fmt: skip
    begin = stream.resume(saved) if saved else (0, 0)
    for epoch, step, batch in stream.run(_spans(pod, begin, len(stream))):
        fields = zip(batch["key"], batch["png"], strict=True)
        contents = [content_of(key, data) for key, data in fields]
        after = stream.state(epoch, step + 1).to_json()
        out.send(Part(rank, (epoch, step), batch["id"], batch["weight"], contents, after))


def content_of(key: str, data: bytes | memoryview) -> int:
    """A checksum of a sample's key and bytes."""
    return zlib.crc32(data, zlib.crc32(key.encode()))


def _spans(pod: Pod, begin: Step, num_steps: int) -> Iterator[tuple[int, range]]:
    epoch, step = begin
    yield from ((number, range(step if number == epoch else 0, num_steps)) for number in range(epoch, pod.epochs))


class Run:
    """The run of a pod over all its lives. `stored` are the contents of the samples by id."""

    def __init__(self, pod: Pod, stored: list[int], max_readers: int, draw: random.Random) -> None:
        self.outcome = Outcome(num_samples=len(stored))
        self._pod, self._stored, self._draw, self._max_readers = pod, stored, draw, max_readers
        self._storage = open_storage(pod.url)
        self._state: str | None = None
        self._order: Order | None = None
        self._recorded: dict[Step, np.ndarray] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["shardset.stream.stream", "tests.conftest", "tests.makers.shardset"])

    def live(self, *, is_last: bool) -> None:
        """One life: from the recorded state until its readers are killed, or to the end of the run."""
        world = self._next_world()
        self.outcome.worlds.append(world)
        pipes, readers = [], []
        for rank in range(world):
            pipe, out = self._context.Pipe(duplex=False)
            reader = self._context.Process(target=read, args=(self._pod, rank, world, self._state, out), daemon=True)
            reader.start()
            out.close()
            pipes.append(pipe)
            readers.append(reader)
        try:
            self._follow(pipes, None if is_last else self._draw.randint(0, MAX_STEPS_A_LIFE))
        finally:
            self._kill(readers)

    def _next_world(self) -> int:
        """All readers, then one less, then any other number than before."""
        worlds = self.outcome.worlds
        if len(worlds) < 2:
            return self._max_readers - len(worlds)
        return self._draw.choice([world for world in range(1, self._max_readers + 1) if world != worlds[-1]])

    def is_done(self) -> bool:
        """Whether every step of every epoch has been recorded."""
        order = self._order
        return order is not None and len(self._recorded) == self._pod.epochs * order.num_batches

    def check(self) -> None:
        """Raises NotExactlyOnce unless the recorded batches are those of the order, each sample once an epoch."""
        assert self._order is not None
        for epoch in range(self._pod.epochs):
            seen = []
            for step in range(self._order.num_batches):
                expected = self._order.batch(epoch, step)
                if not np.array_equal(self._recorded[epoch, step], expected.ids):
                    raise NotExactlyOnce(f"epoch {epoch} step {step}: not the batch of the order")
                seen += expected.ids[expected.weights > 0].tolist()
            if sorted(seen) != list(range(len(self._stored))):
                raise NotExactlyOnce(f"epoch {epoch}: {len(seen)} samples, expected each of {len(self._stored)} once")

    def _follow(self, pipes: list[Connection], num_steps: int | None) -> None:
        """Puts the parts of steps together and records every few of them, until `num_steps` are whole."""
        parts: dict[Step, list[Part]] = defaultdict(list)
        unrecorded: dict[Step, np.ndarray] = {}
        num_whole, open_pipes = 0, set(pipes)
        while open_pipes and (num_steps is None or num_whole < num_steps):
            for pipe in wait(list(open_pipes)):
                assert isinstance(pipe, Connection)
                try:
                    part = pipe.recv()
                except EOFError:
                    open_pipes.discard(pipe)
                    continue
                own = parts[part.step]
                own.append(part)
                if len(own) == len(pipes):
                    num_whole += 1
                    unrecorded[part.step] = self._whole(parts.pop(part.step))
                    if len(unrecorded) == RECORDED_EVERY or not self._has_next(part.step):
                        self._record(unrecorded, part.state_after)
                        unrecorded = {}
        self.outcome.num_lost += len(unrecorded) + len(parts)

    def _whole(self, parts: list[Part]) -> np.ndarray:
        """The ids of a global batch; raises NotExactlyOnce unless its parts have the stored contents and one state."""
        parts.sort(key=lambda part: part.rank)
        ids = np.concatenate([part.ids for part in parts])
        contents = list(itertools.chain(*(part.contents for part in parts)))
        step = parts[0].step
        if [self._stored[id_] for id_ in ids.tolist()] != contents:
            raise NotExactlyOnce(f"epoch {step[0]} step {step[1]}: a sample is not what was stored")
        if len({part.state_after for part in parts}) != 1 or max(sizes := [len(p.ids) for p in parts]) - min(sizes) > 1:
            raise NotExactlyOnce(
                f"epoch {step[0]} step {step[1]}: readers differ in their state, or in more than a row"
            )
        return ids

    def _record(self, batches: dict[Step, np.ndarray], state: str) -> None:
        """Writes the state to the bucket, and counts the steps before it as done."""
        if twice := batches.keys() & self._recorded.keys():
            raise NotExactlyOnce(f"steps {sorted(twice)} were recorded twice")
        put(self._storage, STATE, state.encode())
        self._state = self._storage.read(STATE).decode()
        self._recorded |= batches
        self.outcome.num_recorded += len(batches)
        self._order = self._order or self._order_of(state_from_json(state))

    def _order_of(self, state: OrderState) -> Order:
        split = load(self._pod.url).manifest.split(SPLIT)
        return Order(
            shard_sizes=[shard.num_samples for shard in split.shards], seed=SEED, global_batch_size=self._pod.batch,
            num_lanes=state.num_lanes, block_size=state.block_size, window=state.window,
        )  # fmt: skip

    def _has_next(self, step: Step) -> bool:
        last = -(-len(self._stored) // self._pod.batch) - 1
        return step != (self._pod.epochs - 1, last)

    def _kill(self, readers: Sequence[BaseProcess]) -> None:
        for reader in self._draw.sample(readers, len(readers)):
            reader.kill()
        for reader in readers:
            reader.join()


def run(server: str, *, readers: int, lives: int, samples: int, batch: int, epochs: int, seed: int) -> Outcome:
    """Reads all epochs in `lives` lives that are killed and one that is not; raises NotExactlyOnce."""
    os.environ["STORAGE_EMULATOR_HOST"] = server
    pod = Pod(server=server, url=f"gs://{BUCKET}/chaos-{seed}-{os.getpid()}", batch=batch, epochs=epochs)
    made = png_samples(SPLIT, samples, size=8)
    write_shard_set(open_storage(pod.url), {SPLIT: made}, num_shards=max(1, samples // 100))
    stored = [content_of(sample.key, sample.fields[0][1]) for sample in made]
    draw = random.Random(seed)
    whole = Run(pod, stored, readers, draw)
    for number in range(lives + 1):
        if not whole.is_done():
            whole.live(is_last=number == lives)
    whole.check()
    return whole.outcome


def main() -> None:
    """Runs one pod and prints what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=40, help="most readers of a life")
    parser.add_argument("--lives", type=int, default=10, help="lives that are killed")
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=240)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, emulator(Path(folder, "log")) as server:
        outcome = run(server, **vars(args))
    print(f"{environment.machine()}, commit {environment.commit()}\n{outcome}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
