"""A run that another one overtakes at any moment of a save: it changes nothing of the other one, and says one thing."""

import itertools
import shutil
import uuid
from collections.abc import Callable, Sequence

import pytest

from shardset.errors import ShardsetError
from shardset.storage.base import Storage
from shardset.storage.memory import MemoryStorage
from tests.makers.doors import told
from tests.trainer.record.test_checkpoint import newest, put, saved, state_at
from trainer.errors import RunTaken
from trainer.record import checkpoint
from trainer.record.checkpoint import CheckpointWriter
from trainer.record.run_folder import RunFolder
from trainer.supervise.run_lock import HOLDER, Lease, RunLock, SeenLease, this_process

LONG_S, PATIENCE_S = 600.0, 35.0
LOG = "metrics.jsonl"


def lease(storage: Storage, patience_s: float, clock: Callable[[], float] = lambda: 0.0) -> Lease:
    return Lease(storage, this_process(), lambda _: None, beat_s=LONG_S, patience_s=patience_s, clock=clock)


def save(storage: Storage, lock: RunLock, log: str, *steps: int) -> list[ShardsetError]:
    """What a run does in its folder, from its start to its end; returns what failed."""
    errors: list[ShardsetError] = []

    def attempt(action: Callable[[], None]) -> None:
        try:
            action()
        except ShardsetError as error:
            errors.append(error)

    folder = RunFolder(storage.url, 0, lock)
    folder.storage = storage
    writer = CheckpointWriter(storage, 1, folder.flush, lock=lock)
    for step in steps:
        (folder.local / LOG).write_text(f"{log} up to {step}")
        writer.save(state_at(step), top1=0.5 if step == 5 else None)  # the best is kept, whatever is newer
    attempt(writer.close)
    (folder.local / LOG).write_text(f"{log} to the end")
    attempt(folder.close)
    shutil.rmtree(folder.local, ignore_errors=True)
    return errors


def generations(storage: Storage) -> dict[str, str]:
    return {stat.name: stat.generation for stat in storage.list() if stat.name != HOLDER}


def overtaken(moment: int, *, before: int, rival_saves: Sequence[int], lock: str) -> bool:
    """Saves step 12 over step `before` while another run takes the folder at call `moment`; False after the last one.

    Before each call, which then arrives late, and after each write.
    """
    storage, now, calls = MemoryStorage(uuid.uuid4().hex, ""), [0.0], [0]
    saved(storage, before)
    for step in (9, before):
        put(storage, f"{checkpoint.folder_of(step)}state-0123456789ab.pt", b"left by a killed save")
    standing: dict[str, str] = {}
    failed: list[ShardsetError] = []

    def overtake(verb: str, name: str) -> None:
        calls[0] += 1
        if calls[0] == moment:
            if lock != "lease without a clock":
                now[0] += 1.1 * PATIENCE_S
            rival = lease(storage, 0.0)
            failed.extend(save(storage, rival, "rival", *rival_saves))
            if 20 not in rival_saves:
                put(storage, f"{checkpoint.folder_of(30)}state-abcdefabcdef.pt", b"the next save, on its way")
            standing.update(generations(storage))
            if 20 in rival_saves:
                rival.close()

    door = told(storage, uuid.uuid4().hex, nothing)
    first = lease(door, PATIENCE_S, lambda: now[0])
    told(storage, door.key, overtake)
    errors = save(door, SeenLease(door, first.token) if lock == "seen lease" else first, "first", 12)
    told(storage, door.key, nothing)
    first.close()
    if calls[0] < moment:
        assert errors == []
        assert {name.rpartition("/")[0] for name in generations(storage)} == {"checkpoints/step-000000012", ""}
        assert len(generations(storage)) == 3
        return False
    assert failed == []
    if rival_saves:
        assert standing.items() <= generations(storage).items()
    if rival_saves != (5,):
        commit, state = newest(storage)
        assert commit.step == state["step"] == (rival_saves or (before,))[-1]
    assert storage.read(LOG) == b"rival to the end"
    # After the last call there is nothing left to lose.
    assert errors or calls[0] == moment
    assert all(isinstance(error, RunTaken) for error in errors)
    return True


def nothing(verb: str, name: str) -> None:
    """What a door tells while nobody listens."""


@pytest.mark.parametrize(
    ("before", "rival_saves", "lock"),
    [
        (5, (12, 20), "lease"), (5, (12, 20), "lease without a clock"), (5, (12,), "seen lease"), (5, (5,), "lease"),
        (12, (12, 20), "seen lease"), (12, (12,), "lease without a clock"), (12, (), "lease"),
    ],
)  # fmt: skip
def test_a_run_that_is_overtaken_at_any_moment_changes_nothing_of_the_other_one(
    before: int, rival_saves: Sequence[int], lock: str
) -> None:
    # A rival that saves step 20 ends; others still hold the folder. One has only started: then a late mark may replace
    # that of the same step, which is whole either way. One saves the step before again, which was to be deleted.
    moments = itertools.takewhile(
        lambda moment: overtaken(moment, before=before, rival_saves=rival_saves, lock=lock), itertools.count(1)
    )
    assert len(list(moments)) > 20
