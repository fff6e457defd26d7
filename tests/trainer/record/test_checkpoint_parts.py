"""Checkpoints that several processes write together; here the processes are threads over one storage."""

import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shardset.errors import TransientError
from shardset.storage.base import Storage, Writer
from shardset.storage.memory import MemoryStorage
from tests.makers.mortal import Killed, mortal
from tests.trainer.record.test_checkpoint import put, state_at, unexpected
from trainer.errors import CheckpointError
from trainer.record import checkpoint
from trainer.record.checkpoint import CheckpointWriter
from trainer.record.checkpoint_parts import Peers, joined

ROWS = 5
"""Rows of the weight that is cut: three processes keep 2, 2 and 1 of them."""


class Meeting:
    """Where the threads exchange their texts. One that is lost breaks it for all."""

    def __init__(self, num: int) -> None:
        self._texts: dict[int, str] = {}
        self._barrier = threading.Barrier(num)

    def peer(self, host: int) -> Peers:
        return Peers(host, lambda text: self._exchange(host, text))

    def leave(self) -> None:
        self._barrier.abort()

    def _exchange(self, host: int, text: str) -> list[str]:
        self._texts[host] = text
        self._barrier.wait(600)
        texts = [text for _, text in sorted(self._texts.items())]
        self._barrier.wait(600)
        return texts


def weight_at(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 2.0).reshape(ROWS, 2) + step


def part_at(step: int, host: int, num: int) -> Any:
    """What a process saves: the first one everything, with its rows of what is cut."""
    chunks = [*weight_at(step).chunk(num), *[torch.empty(0, 2)] * num]
    cut = {"model": {"cut": chunks[host]}, "optimizer": {0: {"moment": chunks[host] * 2}}}
    if host:
        return {**cut, "step": step}
    whole = state_at(step)
    return whole | {
        "model": whole["model"] | cut["model"],
        "optimizer": {0: whole["optimizer"][0] | cut["optimizer"][0]},
    }


def write_together(storages: Sequence[Storage], step: int, **how: Any) -> list[BaseException | None]:
    """Writes a checkpoint in as many processes; returns how each ended."""
    meeting = Meeting(len(storages))

    def write(host: int) -> BaseException | None:
        try:
            checkpoint.write(storages[host], part_at(step, host, len(storages)), 0.5, peers=meeting.peer(host), **how)
        except (Killed, CheckpointError, TransientError, threading.BrokenBarrierError) as error:
            if isinstance(error, Killed):
                meeting.leave()
            return error
        return None

    with ThreadPoolExecutor(len(storages)) as pool:
        return list(pool.map(write, range(len(storages))))


def newest(storage: Storage) -> tuple[checkpoint.CommitMark, Any]:
    found = checkpoint.newest(storage, unexpected)
    assert found is not None
    return found


def names_of(storage: Storage) -> list[str]:
    return [stat.name.rpartition("/")[2] for stat in storage.list()]


@pytest.mark.parametrize("num", [2, 3, 7])
def test_parts_of_any_number_of_processes_come_back_in_one_piece(storage: Storage, num: int) -> None:
    assert write_together([storage] * num, 5) == [None] * num
    commit, state = newest(storage)
    assert (commit.step, len(commit.files)) == (5, num)
    assert torch.equal(state["model"]["cut"], weight_at(5))
    assert torch.equal(state["optimizer"][0]["moment"], 2 * weight_at(5))
    assert torch.equal(state["model"]["weight"], state_at(5)["model"]["weight"])
    assert set(names_of(storage)) == {"commit.json", *(file.name for file in commit.files)}
    assert [file.name[len("state-1f0c5a7be2d9") :] for file in commit.files] == [
        ".pt", *(f"-part-{host:05d}.pt" for host in range(1, num))
    ]  # fmt: skip


@pytest.mark.parametrize("counts", [(2, 3), (3, 2), (3, 1), (1, 3)])
def test_a_step_saved_again_by_another_number_of_processes_replaces_all_parts(
    storage: Storage, counts: tuple[int, int]
) -> None:
    for num in counts:
        assert write_together([storage] * num, 5) == [None] * num
    checkpoint.retain(storage, keep=1)
    assert torch.equal(newest(storage)[1]["model"]["cut"], weight_at(5))
    assert len(names_of(storage)) == 1 + counts[1]


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "swapped"])
@pytest.mark.parametrize("host", range(3))
def test_a_damaged_part_is_named_and_the_checkpoint_before_it_used(storage: Storage, damage: str, host: int) -> None:
    for step in (5, 12):
        write_together([storage] * 3, step)
    before, where = (
        checkpoint.folder_of(commit.step) + commit.files[host].name for commit in checkpoint.commits(storage)
    )
    data = bytearray(storage.read(where))
    data[len(data) // 2] ^= 1
    other = storage.read(before)
    storage.delete(where)
    if damage != "gone":
        put(storage, where, {"cut": bytes(data[:-9]), "flip": bytes(data), "swapped": other}[damage])
    warnings: list[str] = []
    commit, state = checkpoint.newest(storage, warnings.append) or (None, None)
    assert commit is not None
    assert state is not None
    assert commit.step == 5
    assert len(warnings) == 1
    assert where in warnings[0]


@pytest.mark.parametrize("before", [5, 12])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("lives", range(5))
def test_a_kill_of_any_process_at_any_moment_leaves_a_whole_checkpoint(before: int, victim: int, lives: int) -> None:
    storage = MemoryStorage(uuid.uuid4().hex, "")
    write_together([storage] * 2, before)
    write_together([mortal(storage, lives if host == victim else 99) for host in range(3)], 12)
    commit, state = newest(storage)
    assert torch.equal(state["model"]["cut"], weight_at(commit.step))
    assert commit.step in (before, 12)
    # What the next life does.
    assert write_together([storage] * 2, 12) == [None, None]
    assert torch.equal(newest(storage)[1]["model"]["cut"], weight_at(12))


class Refusing(MemoryStorage):
    """A storage that takes nothing."""

    def writer(self, name: str, *, if_generation: str | None = None) -> Writer:
        raise TransientError("503")


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_part_that_could_not_be_stored_is_an_error_in_all_processes(victim: int) -> None:
    storage = MemoryStorage(uuid.uuid4().hex, "")
    storages = [Refusing(storage.name, "") if host == victim else storage for host in range(3)]
    errors = write_together(storages, 5)
    assert [type(error) for error in errors] == [
        TransientError if host == victim else CheckpointError for host in range(3)
    ]
    assert str(errors[victim - 1]) == f"process {victim}: 503"
    assert checkpoint.commits(storage) == []


def test_weights_that_are_no_numbers_in_any_part_are_never_committed() -> None:
    storage, meeting = MemoryStorage(uuid.uuid4().hex, ""), Meeting(2)
    writers = [CheckpointWriter(storage, 3, peers=meeting.peer(host)) for host in range(2)]
    parts = [part_at(5, host, 2) for host in range(2)]
    parts[1]["model"]["cut"][0, 0] = float("nan")
    for writer, part in zip(writers, parts, strict=True):
        writer.save(part, top1=None)
    for writer in writers:
        with pytest.raises(CheckpointError, match="1 weights of step 5 are not finite, 'cut' first"):
            writer.close()
    assert checkpoint.commits(storage) == []


def test_writers_go_on_together_after_a_failure_and_only_the_first_deletes() -> None:
    storage, meeting = MemoryStorage(uuid.uuid4().hex, ""), Meeting(2)
    failing = iter([True, False, False, False])

    def flush() -> None:
        if next(failing):
            raise TransientError("503")

    told: list[list[str]] = [[], []]
    writers = [CheckpointWriter(storage, 2, flush, told[host].append, meeting.peer(host)) for host in range(2)]

    def save(host: int) -> None:
        for step in range(1, 5):
            writers[host].save(part_at(step, host, 2), top1=None)
        writers[host].close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, range(2)))
    assert [commit.step for commit in checkpoint.commits(storage)] == [3, 4]
    assert ["step 1 could not be written" in texts[0] for texts in told] == [True, True]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"a": torch.ones(2)}, {}], "'a' is in 1 of 2 parts"),
        ([{"b": torch.ones(2)}], "a part has 'b', which the first one lacks"),
    ],
)
def test_parts_that_are_not_of_one_state_are_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joined({"a": torch.ones(2)}, parts)
