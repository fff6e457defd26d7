"""A pod whose hosts are lost and come back: is every sample still in exactly one global batch of an
epoch?

python -m benchmarks.chaos [--max-readers 40] [--lives 10] [--samples 6000] [--batch 240]
[--epochs 2] [--seed 1]

Up to `--max-readers` processes stream one shard set from a GCS emulator. In each life of the run
their number is another: all, then one less, then any; most do not divide the batch. A life ends at
a random moment, also while it starts: its readers are killed, as a lost host ends a training, and
the next life resumes from the last state that the run recorded in the bucket. What was read after
that state counts no more, as after a checkpoint. Every sample's key and bytes are compared with
what was stored.
"""

import json
import multiprocessing
import os
import random
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks import environment
from benchmarks.measuring import parser_of
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.conftest import BUCKET, emulator
from tests.makers.shardset import new_set, png_samples

SPLIT, SEED, STATE = "train", 7, "run/state.json"
MAX_STEPS_A_LIFE = 6
RECORDED_EVERY = 3

Step = tuple[int, int]
"""(epoch, step)."""


class NotExactlyOnce(AssertionError):
    """Readers together did not read what the order says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What all readers of a run have in common.

    The set lies at `url` in the emulator at `server`.
    """

    server: str
    url: str
    batch: int
    epochs: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one reader gives for a step; `contents` are the CRC32 of each sample's key and bytes."""

    step: Step
    ids: np.ndarray
    contents: list[int]
    state_after: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Lives by their number of readers, and steps by what became of them."""

    worlds: list[int]
    num_recorded: int
    num_lost: int
    num_samples: int

    def __str__(self) -> str:
        return (
            f"{len(self.worlds)} lives of {', '.join(map(str, self.worlds))} readers;"
            f" {self.num_recorded} steps recorded, {self.num_lost} read and lost;"
            f" {self.num_samples:,} samples, each once an epoch"
        )


def read(pod: Pod, rank: int, world_size: int, state: str | None, out: Connection) -> None:
    """One reader: sends its part of each step from a state to the end of the run."""
    os.environ["STORAGE_EMULATOR_HOST"] = pod.server
    stream = stream_of(pod, rank, world_size)
    first, start = stream.load_state_dict(json.loads(state)) if state else (0, 0)
    spans = (
        (epoch, range(start if epoch == first else 0, len(stream)))
        for epoch in range(first, pod.epochs)
    )
    for epoch, step, batch in stream.run(spans):
        contents = [
            content_of(key, data) for key, data in zip(batch["key"], batch["png"], strict=True)
        ]
        state = json.dumps(stream.state(epoch, step + 1))
        out.send(Part((epoch, step), batch["id"], contents, state))


def stream_of(pod: Pod, rank: int, world_size: int) -> Stream:
    """The stream of one reader."""
    return Stream(
        pod.url, SPLIT, global_batch_size=pod.batch, rank=rank, world_size=world_size, seed=SEED,
        image=None, fields=("png",), with_key=True, num_threads=1,
    )  # fmt: skip


def content_of(key: str, data: bytes | memoryview) -> int:
    """The CRC32 of a sample's key and bytes."""
    return zlib.crc32(data, zlib.crc32(key.encode()))


@contextmanager
def readers(pod: Pod, world: int, state: str | None) -> Iterator[list[Connection]]:
    """Starts all readers, gives their pipes in the order of their ranks, and kills them at the end
    of the block.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["shardset.stream.stream", "tests.conftest", "tests.makers.shardset"]
    )
    pipes, processes = [], []
    for rank in range(world):
        pipe, out = context.Pipe(duplex=False)
        process = context.Process(target=read, args=(pod, rank, world, state, out), daemon=True)
        process.start()
        out.close()
        pipes.append(pipe)
        processes.append(process)
    try:
        yield pipes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def whole(parts: Sequence[Part], stored: Sequence[int]) -> np.ndarray:
    """The ids of a global batch; raises NotExactlyOnce unless its parts have the stored contents
    and one state.
    """
    where = "epoch {} step {}".format(*parts[0].step)
    ids = np.concatenate([part.ids for part in parts])
    if [stored[id_] for id_ in ids.tolist()] != [
        content for part in parts for content in part.contents
    ]:
        raise NotExactlyOnce(f"{where}: a sample is not what was stored")
    sizes = [len(part.ids) for part in parts]
    if len({(part.step, part.state_after) for part in parts}) != 1 or max(sizes) - min(sizes) > 1:
        raise NotExactlyOnce(f"{where}: readers differ in their state, or in more than a row")
    return ids


def check(pod: Pod, recorded: dict[Step, np.ndarray], state: str, num_samples: int) -> None:
    """Raises NotExactlyOnce unless the recorded batches are those of the order, each sample once an
    epoch.
    """
    stream = stream_of(pod, 0, 1)
    stream.load_state_dict(json.loads(state))
    order = stream.order
    for epoch in range(pod.epochs):
        seen = []
        for step in range(order.num_batches):
            expected = order.batch(epoch, step)
            if not np.array_equal(recorded[epoch, step], expected.ids):
                raise NotExactlyOnce(f"epoch {epoch} step {step}: not the batch of the order")
            seen += expected.ids[expected.weights > 0].tolist()
        if sorted(seen) != list(range(num_samples)):
            raise NotExactlyOnce(
                f"epoch {epoch}: {len(seen)} samples, expected each of {num_samples} once"
            )


def next_world(worlds: Sequence[int], max_readers: int, draw: random.Random) -> int:
    """All readers, then one less, then any other number than before."""
    if len(worlds) < 2:
        return max_readers - len(worlds)
    return draw.choice([world for world in range(1, max_readers + 1) if world != worlds[-1]])


def run(
    server: str, *, max_readers: int, lives: int, samples: int, batch: int, epochs: int, seed: int
) -> Outcome:
    """Reads all epochs in `lives` lives that are killed and one that is not;
    raises NotExactlyOnce.
    """
    os.environ["STORAGE_EMULATOR_HOST"] = server
    pod = Pod(
        server=server, url=f"gs://{BUCKET}/chaos-{seed}-{os.getpid()}", batch=batch, epochs=epochs
    )
    storage, draw = open_storage(pod.url), random.Random(seed)
    made = png_samples(SPLIT, samples, size=8)
    new_set(made, pod.url, num_shards=max(1, samples // 100))
    stored = [content_of(sample.key, sample.fields[0][1]) for sample in made]
    worlds: list[int] = []
    recorded: dict[Step, np.ndarray] = {}
    state, num_lost = None, 0
    for life in range(lives + 1):
        left = epochs * -(-samples // batch) - len(recorded)
        num_steps = left if life == lives else min(left, draw.randint(0, MAX_STEPS_A_LIFE))
        worlds.append(next_world(worlds, max_readers, draw))
        fresh: dict[Step, np.ndarray] = {}
        with readers(pod, worlds[-1], state) as pipes:
            for number in range(1, num_steps + 1):
                parts = [pipe.recv() for pipe in pipes]
                fresh[parts[0].step] = whole(parts, stored)
                if number % RECORDED_EVERY == 0 or number == left:
                    if twice := fresh.keys() & recorded.keys():
                        raise NotExactlyOnce(f"steps {sorted(twice)} were recorded twice")
                    storage.write(STATE, parts[0].state_after.encode())
                    state = storage.read(STATE).decode()
                    recorded |= fresh
                    fresh = {}
        num_lost += len(fresh)
    assert state is not None
    check(pod, recorded, state, samples)
    return Outcome(worlds, len(recorded), num_lost, samples)


def main() -> None:
    """Runs one pod and prints what became of it."""
    parser = parser_of(__doc__)
    for name, default in (
        ("max-readers", 40),
        ("lives", 10),
        ("samples", 6000),
        ("batch", 240),
        ("epochs", 2),
        ("seed", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, emulator(Path(folder, "log")) as server:
        outcome = run(server, **vars(args))
    print(f"{environment.today()}\n{outcome}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
