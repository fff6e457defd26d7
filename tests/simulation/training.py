"""Elastic training under a seed: killed, stopped, preempted, taken over, on another number of hosts
at each start.

The learner is a chain of hashes over the ids of the global batches: one sample that is skipped,
repeated or moved changes all that follow.
"""

import contextlib
import faulthandler
import hashlib
import io
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import msgspec
import numpy as np
import torch

import trainer.run
from shardset.errors import ShardsetError
from shardset.order.epoch import Order
from shardset.order.lanes import rank_part
from shardset.order.selection import Selection
from shardset.order.state import OrderState
from shardset.stream.spec import Batch
from tests.simulation.baton import Baton, Process, Task
from tests.simulation.bucket import CALM, STORMY, Bucket, Object
from trainer.config import TrainConfig
from trainer.data.splits import Data
from trainer.data.step_rows import SUMS
from trainer.errors import EpochMismatch, NotFinite
from trainer.loop import train
from trainer.run_folder import lock
from trainer.run_folder.checkpoint import CommitMark, state_from_bytes
from trainer.run_folder.names import CHECKPOINTS, COMMIT, folder_of
from trainer.runtime.base import Single
from trainer.runtime.preemption import PreemptionNotice
from trainer.telemetry import metrics

RUN = "bucket/run/"
NUM_SAMPLES, BATCH, EPOCHS, MOST_HOSTS = 20, 8, 3, 4
CALM_AFTER_S, MOST_STARTS = 1500.0, 60
DIGEST = "simulated"

CONFIG = TrainConfig(
    manifest="gs://bucket/set",
    run_dir="gs://bucket/run",
    epochs=EPOCHS,
    global_batch_size=BATCH,
    num_lanes=4,
    checkpoint_every_steps=1,
    keep_checkpoints=2,
    log_every_steps=2,
    stall_timeout_s=10_000,
)
ORDER = Order(
    shard_sizes=[7, 7, 6], seed=0, global_batch_size=BATCH, num_lanes=4, block_size=2, window=3
)


def live_through(seed: int) -> Baton:
    """One run from its first start to its end, whatever happens; raises Failed where it is not the
    undisturbed one.
    """
    baton = Baton(seed)
    world = Training(baton, Bucket(baton, STORMY))
    with world.installed():
        baton.run(world.live)
    return baton


def _next(chain: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    data = hashlib.sha256(chain.numpy().tobytes() + np.array(ids, np.int64).tobytes()).digest()
    return torch.frombuffer(bytearray(data), dtype=torch.int64)


def _chains() -> list[torch.Tensor]:
    """The chain after each step of an undisturbed run."""
    chains = [torch.zeros(4, dtype=torch.int64)]
    for step in range(EPOCHS * ORDER.num_batches):
        slots = ORDER.batch(*divmod(step, ORDER.num_batches))
        chains.append(_next(chains[-1], slots.ids[slots.weights > 0].tolist()))
    return chains


CHAINS = _chains()


# --- what stands for devices, data and model ------------------------------------------------------


class Group:
    """The hosts of a run, which exchange values in rounds."""

    def __init__(self, baton: Baton, num_hosts: int) -> None:
        self._baton, self.num_hosts = baton, num_hosts
        self._rounds: list[dict[int, Any]] = []
        self._next = [0] * num_hosts

    def exchange(self, host: int, value: Any) -> list[Any]:
        """The values of all hosts; waits until every host has given its own."""
        number = self._next[host]
        self._next[host] += 1
        if number == len(self._rounds):
            self._rounds.append({})
        found = self._rounds[number]
        found[host] = value
        self._baton.wait(lambda: len(found) == self.num_hosts, 1e9)
        return [found[host] for host in range(self.num_hosts)]


class Host(Single):
    """A host of a group."""

    def __init__(self, group: Group, host: int) -> None:
        super().__init__("fp32")
        self.group, self.host, self.num_hosts = group, host, group.num_hosts

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        return [
            sum(column)
            for column in zip(*self.group.exchange(self.host, list(values)), strict=True)
        ]

    def sum_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.group.exchange(self.host, tensor)).sum(0)


class ChainLearner:
    """Has the interface of trainer.model.learner.Learner. The labels of its batches are the ids."""

    committed: ClassVar[set[int]]
    """The steps whose checkpoints were ever committed."""

    def __init__(self, runtime: Host, config: TrainConfig, num_classes: int, state: Any) -> None:
        assert state is None or state["step"] in self.committed, (
            "a run resumes at what was not committed"
        )
        self._runtime = runtime
        self._chain = CHAINS[0] if state is None else state["model"]["chain"]

    def train_step(
        self, batch: dict[str, torch.Tensor], rate: float, key: int, weight: float | None
    ) -> torch.Tensor:
        ids = batch["label"][batch["weight"] > 0].tolist()
        parts = self._runtime.group.exchange(self._runtime.host, ids)
        self._chain = _next(self._chain, [id_ for part in parts for id_ in part])
        return self.eval_step(batch)

    def eval_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sums = {"weight": batch["weight"].sum().item()}
        return torch.tensor([sums.get(name, 0.0) for name in SUMS])

    def broadcast_buffers(self) -> None: ...

    def state(self) -> dict[str, Any]:
        names = ("optimizer", "optimizer_counters", "scaler")
        model = {"chain": self._chain.clone()}
        return {"model": model, "ema": None, **{name: {} for name in names}}


@dataclass
class Ids:
    """A stream of ids in place of images: those of one host in each batch of an order."""

    order: Order
    host: int
    num_hosts: int

    def __len__(self) -> int:
        return self.order.num_batches

    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[tuple[int, int, Batch]]:
        part = rank_part(BATCH, self.host, self.num_hosts)
        for epoch, steps in spans:
            for step in steps:
                slots = self.order.slots(epoch, range(step, step + 1), part.start, part.stop)[0]
                image = np.zeros((len(part), 1, 1, 3), np.uint8)
                yield (
                    epoch,
                    step,
                    {"image": image, "label": slots.ids, "id": slots.ids, "weight": slots.weights},
                )

    def state(self, epoch: int, step: int) -> OrderState:
        return self.order.state(epoch, step, DIGEST)

    def load_state_dict(self, state: OrderState) -> object:
        return self.order.resume(state, DIGEST)

    def stop(self) -> None: ...


def _open_data(config: TrainConfig, host: int, num_hosts: int) -> Data:
    stored = Order(
        shard_sizes=[NUM_SAMPLES],
        seed=None,
        global_batch_size=BATCH,
        num_lanes=4,
        block_size=20,
        window=0,
    )
    return Data(
        train=Ids(ORDER, host, num_hosts),
        evaluation=Ids(stored, host, num_hosts),
        class_names=("a", "b"),
        manifest_digest=DIGEST,
        eval_split="test",
        train_ids=Selection(NUM_SAMPLES),
        num_eval_samples=NUM_SAMPLES,
    )


# --- what happens ---------------------------------------------------------------------------------


@dataclass
class Start:
    """One start of the command: its hosts."""

    tasks: list[Task]

    @property
    def is_over(self) -> bool:
        return all(task.is_over for task in self.tasks)

    @property
    def has_lost(self) -> bool:
        """Whether a host has died or failed, which the others learn from their heartbeats."""
        return any(task.process.is_killed or task.error for task in self.tasks)

    @property
    def has_finished(self) -> bool:
        return all(task.is_done and task.error is None for task in self.tasks)

    def kill(self) -> None:
        for task in self.tasks:
            if not task.is_done:
                task.process.kill()


class Training:
    """A run folder, and what is true of it at every moment."""

    def __init__(self, baton: Baton, bucket: Bucket) -> None:
        self.baton, self.bucket = baton, bucket
        self._notices: dict[int, threading.Event] = {}
        self._starts: list[Start] = []
        self._holders: list[int] = []  # the starts that took the folder, in this order
        self._renewed = 0.0
        self._authors: dict[str, int] = {}
        self._committed: set[int] = set()
        bucket.on_change.append(self._watch)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A block in which the trainer has this learner and this bucket."""
        notices = self._notices

        class Notice(PreemptionNotice):
            """A SIGTERM to one of the hosts, which are threads of this process."""

            def __enter__(self) -> PreemptionNotice:
                self.asked = threading.Event()
                notices[os.getpid()] = self.asked
                return super().__enter__()

            def __bool__(self) -> bool:
                return self.asked.is_set()

        class Silent:
            def __init__(self, folder: object, step: int) -> None: ...

            log_dir = ""

            def add_scalar(self, name: str, value: float, step: int) -> None: ...

            def close(self) -> None: ...

        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(tempfile, "tempdir", folder),
            patch.object(trainer.run, "Learner", ChainLearner),
            patch.object(ChainLearner, "committed", self._committed, create=True),
            patch.object(trainer.run, "PreemptionNotice", Notice),
            patch.object(metrics, "open_events", Silent),
            patch.object(
                metrics, "_now", lambda: self.baton.wall_clock.isoformat(timespec="microseconds")
            ),
            patch.object(lock, "_machine", lambda: f"machine of {os.getpid()}"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            self.bucket.reached(),
        ):
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()

    def live(self) -> None:
        """Starts the command until it has finished, then looks at the end."""
        draw, calm = self.baton.random, self.baton.start(self._calm_down, "calm")
        for _ in range(MOST_STARTS):
            start = self._start(draw.randint(1, MOST_HOSTS))
            self.baton.wait(
                lambda start=start: start.is_over or start.has_lost, draw.uniform(20, 300)
            )
            if start.has_finished:
                break
            if not start.is_over and not start.has_lost:
                self._interrupt(start)
            self.baton.sleep(draw.uniform(0, 60))
        else:
            self.baton.fail(f"{MOST_STARTS} starts did not finish the run; calm: {calm.is_done}")
        self.bucket.faults = CALM
        self.baton.wait_for_peace()
        self._check_errors()
        self._check_end()

    def _calm_down(self) -> None:
        self.baton.sleep(CALM_AFTER_S)
        self.bucket.faults = CALM

    def _start(self, num_hosts: int) -> Start:
        group = Group(self.baton, num_hosts)
        tasks = [
            self.baton.start(
                lambda host=host: train(Host(group, host), CONFIG, open_data=_open_data),
                "train",
                self._process(host),
            )
            for host in range(num_hosts)
        ]
        start = Start(tasks)
        self._starts.append(start)
        self.baton.note(f"start {len(self._starts)} on {num_hosts} hosts")
        self.baton.start(lambda: self._end_with_the_first(start), "heartbeats")
        return start

    def _end_with_the_first(self, start: Start) -> None:
        """What heartbeats do: the others end soon after one has died or failed."""
        self.baton.wait(lambda: start.is_over or start.has_lost)
        self.baton.sleep(self.baton.random.uniform(0, 40))
        start.kill()

    def _process(self, host: int) -> Process:
        process, draw = (
            self.baton.process(f"host {host} of start {len(self._starts) + 1}"),
            self.baton.random,
        )
        if self.bucket.faults is STORMY and draw.random() < 0.4:
            process.fate = draw.randrange(120), draw.choice([Process.kill, self._stop])
        return process

    def _stop(self, process: Process) -> None:
        process.resumes = self.baton.now + self.baton.random.choice([10, 40, 100, 400])

    def _interrupt(self, start: Start) -> None:
        """SIGTERM to one host, and later SIGKILL; or the run is forgotten and goes on; or the wall
        clock jumps.
        """
        draw = self.baton.random
        chance = draw.random()
        if chance < 0.4:
            asked = self._notices.get(draw.choice(start.tasks).process.pid)
            if asked is not None:
                self.baton.note("SIGTERM")
                asked.set()
            self.baton.wait(lambda: start.is_over, 120)
            start.kill()
        elif chance < 0.6:
            start.kill()
        self.baton.wall_jump_s += draw.choice([-86_400, 0, 3600])

    # --- what is true -----------------------------------------------------------------------------

    def _watch(self, name: str, old: Object | None, new: Object | None) -> None:
        own = name.removeprefix(RUN)
        start = self._start_of(self.bucket.author)
        if own == lock.HOLDER:
            age_s = self.baton.now - self._renewed
            if old is not None and start != self._holders[-1] and age_s < lock.PATIENCE_S:
                self.baton.fail(
                    f"start {start} took the lease that start {self._holders[-1]} renewed"
                    f" {age_s:.0f} s ago"
                )
            if new is not None and start not in self._holders:
                self._holders.append(start)
            self._renewed = self.baton.now
            return
        author = self._holders.index(start) if start in self._holders else -1
        if self._authors.get(name, -1) > author:
            change = "replaced" if new else "deleted"
            self.baton.fail(
                f"start {start} has {change} {own} of start {self._holders[self._authors[name]]}"
            )
        self._authors[name] = author if new else -1
        if new is not None and own.startswith(CHECKPOINTS) and own.endswith(COMMIT):
            mark = msgspec.json.decode(new.data, type=CommitMark)
            state = self.bucket.objects.get(name.removesuffix(COMMIT) + mark.state)
            if state is not None and (len(state.data), state.crc32c) == (
                mark.num_bytes,
                mark.crc32c,
            ):
                self._check_chain(state.data, mark.step)
                self._committed.add(mark.step)
            # The network, or a run that was stopped after it had confirmed its lease, may bring
            # back the mark of a checkpoint that is deleted since; those who read it skip it.
            elif not self.bucket.is_late and author == len(self._holders) - 1:
                self.baton.fail(f"{own} marks a state that is not stored")

    def _start_of(self, process: Process) -> int:
        """The number of the start that a process belongs to."""
        hosts = ([task.process for task in start.tasks] for start in self._starts)
        return next(number for number, processes in enumerate(hosts, 1) if process in processes)

    def _check_chain(self, data: bytes, step: int) -> None:
        state = state_from_bytes(data, f"the state of step {step}")
        if state["step"] != step or not torch.equal(state["model"]["chain"], CHAINS[step]):
            self.baton.fail(f"the state of step {step} is not that of an undisturbed run")

    def _check_errors(self) -> None:
        """What ended a start must be a sentence for the user, and none that says that samples are
        wrong.
        """
        for task in (task for start in self._starts for task in start.tasks if task.error):
            if not isinstance(task.error, ShardsetError) or isinstance(
                task.error, EpochMismatch | NotFinite
            ):
                raise task.error

    def _check_end(self) -> None:
        if RUN + folder_of(len(CHAINS) - 1) + COMMIT not in self.bucket.objects:
            self.baton.fail("the run has finished without its last checkpoint")
