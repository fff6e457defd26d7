import io
import pickle
import queue
import re
import shutil
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import msgspec
import pytest
import torch

from shardset.errors import ConfigError, StorageError, TransientError
from shardset.storage.base import Stat
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from tests.makers.doors import told
from trainer.errors import CheckpointError
from trainer.run_folder import checkpoint
from trainer.run_folder.names import COMMIT, folder_of

IDENTITY = {"manifest digest": "abc", "model": "resnet18", "seed": 0}


def state_at(step):
    """What a checkpoint is told from, of the state that a run saves."""
    return {
        "identity": IDENTITY,
        "step": step,
        "epoch": step // 10,
        "model": {"weight": torch.full((3,), float(step))},
    }


def saved(storage, *steps: int, keep=10, top1=None):
    writer = checkpoint.CheckpointWriter(storage, keep)
    for step in steps:
        writer.save(state_at(step), top1=(top1 or {}).get(step))
    writer.close()


def put(storage, name, data):
    with storage.writer(name) as writer:
        writer.write(data)


def state_of(storage, step):
    """The name of the state file of a committed checkpoint."""
    (commit,) = [commit for commit in checkpoint.commits(storage) if commit.step == step]
    return folder_of(step) + commit.state


def unexpected(text):
    raise AssertionError(text)


def newest(storage):
    found = checkpoint.newest(storage, unexpected)
    assert found is not None
    return found


def test_what_was_saved_comes_back_and_a_state_without_its_mark_does_not_count(
    storage,
):
    assert checkpoint.newest(storage, unexpected) is None
    saved(storage, 5, 12)
    put(
        storage,
        folder_of(19) + checkpoint.new_state_name(),
        checkpoint.state_to_bytes(state_at(19)),
    )
    commit, state = newest(storage)
    assert (commit.step, commit.epoch, state["step"]) == (12, 1, 12)
    assert torch.equal(state["model"]["weight"], torch.full((3,), 12.0))
    plain = torch.load(io.BytesIO(storage.read(state_of(storage, 5))), weights_only=True)
    assert plain["identity"] == IDENTITY


def test_the_processes_of_a_machine_read_a_checkpoint_from_a_bucket_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bucket = open_storage(f"memory://{uuid.uuid4().hex}/run")
    saved(bucket, 5)
    seen: list[str] = []
    door = told(bucket, uuid.uuid4().hex, lambda verb, name: seen.append(f"{verb} {name}"))
    # A lock on a file keeps threads apart too, if each opens it.
    with ThreadPoolExecutor(4) as processes:
        found = [*processes.map(newest, [door] * 4)]
    assert {state["step"] for _, state in found} == {5}
    assert seen.count(f"read {state_of(bucket, 5)}") == 1
    (shared,) = tmp_path.iterdir()
    assert shared.stat().st_mode & 0o777 == 0o600
    shared.write_bytes(b"of a process that was killed while it wrote")
    assert newest(door)[1]["step"] == 5
    checkpoint.drop_shared()
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    assert newest(door)[1]["step"] == 5


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(storage, damage):
    saved(storage, 5, 12)
    name = state_of(storage, 12)
    data = bytearray(storage.read(name))
    data[len(data) // 2] ^= 1
    put(storage, name, bytes(data) if damage == "flip" else bytes(data[:-100]))
    warnings = []
    found = checkpoint.newest(storage, warnings.append)
    assert (found[0].step, found[1]["step"]) == (5, 5)
    assert re.fullmatch(".*step-000000012.*", *warnings)
    storage.delete(name)
    assert checkpoint.newest(storage, warnings.append)[0].step == 5


@pytest.mark.parametrize("damaged", ["state", "mark"])
def test_damaged_checkpoints_alone_or_asked_for_by_name_are_an_error(tmp_path, damaged):
    storage = open_storage(str(tmp_path))
    saved(storage, 5)
    put(
        storage,
        state_of(storage, 5) if damaged == "state" else folder_of(5) + COMMIT,
        b"{}",
    )
    with pytest.raises(
        CheckpointError, match="none of 1 checkpoints is intact; start again in another --run-dir"
    ):
        checkpoint.newest(storage, print)
    expected = (
        r"state-\w+.pt: 2 bytes .*, expected .*"
        if damaged == "state"
        else r"commit\.json: not a commit mark .*"
    )
    with pytest.raises(CheckpointError, match=f"{expected}; name another checkpoint"):
        checkpoint.at(open_storage(f"{tmp_path}/{folder_of(5)}"), unexpected)


def test_the_newest_and_the_best_are_kept_and_the_rest_goes(storage):
    saved(storage, *range(1, 8), keep=2, top1={2: 0.5, 3: 0.9, 5: 0.9, 7: 0.1})
    assert [commit.step for commit in checkpoint.commits(storage)] == [3, 6, 7]
    assert {stat.name.split("/")[1] for stat in storage.list()} == {
        f"step-00000000{step}" for step in (3, 6, 7)
    }


def test_a_checkpoint_that_can_not_be_removed_stays_is_told_once_and_ends_no_run(
    storage,
):
    saved(storage, 1, 2)
    held, notes = folder_of(1) + COMMIT, list[str]()

    def refuse(verb: str, name: str) -> None:
        if (verb, name) == ("delete", held):
            raise StorageError(f"{name}: it is under a hold")

    door = told(storage, uuid.uuid4().hex, refuse)
    writer = checkpoint.CheckpointWriter(door, 1, tell=notes.append)
    for step in (3, 4):
        writer.save(state_at(step), top1=None)
    writer.close()
    # Step 1 stays whole, all else goes.
    assert {step for step in range(5) if list(storage.list(folder_of(step)))} == {1, 4}
    assert [commit.step for commit in checkpoint.commits(storage)] == [1, 4]
    assert newest(storage)[0].step == 4
    assert storage.stat(state_of(storage, 1)).num_bytes
    assert notes == [f"old checkpoints that can't be removed stay: {held}: it is under a hold"]


def test_a_url_means_a_checkpoint_or_the_newest_of_a_run(storage):
    saved(storage, 5, 12)
    inside = folder_of(5)
    assert checkpoint.at(open_storage(f"{storage.url}/{inside}"), unexpected)[0].step == 5
    assert checkpoint.at(storage, unexpected)[0].step == 12
    with pytest.raises(CheckpointError, match="neither"):
        checkpoint.at(open_storage(f"{storage.url}/elsewhere"), unexpected)


def test_a_checkpoint_is_written_beside_the_run_and_counts_after_what_must_be_there_before():
    storage, may_count = MemoryStorage(uuid.uuid4().hex, ""), threading.Event()
    writer = checkpoint.CheckpointWriter(storage, 3, before_commit=lambda: may_count.wait(600))
    writer.save(state_at(1), top1=None)
    assert checkpoint.commits(storage) == []
    may_count.set()
    writer.close()
    assert [commit.step for commit in checkpoint.commits(storage)] == [1]


@pytest.mark.parametrize(("which", "value"), [("model", float("nan")), ("ema", float("inf"))])
def test_weights_that_are_not_finite_are_never_saved(which, value):
    storage = MemoryStorage(uuid.uuid4().hex, "")
    saved(storage, 5)
    state = {**state_at(6), "ema": state_at(6)["model"]}
    state[which]["weight"][1] = value
    writer = checkpoint.CheckpointWriter(storage, 3)
    writer.save(state, top1=None)
    with pytest.raises(CheckpointError, match="1 weights of step 6 are not finite, 'weight' first"):
        writer.close()
    assert [commit.step for commit in checkpoint.commits(storage)] == [5]


class Broken(MemoryStorage):
    """A storage that loses the last byte of a state."""

    def stat(self, name: str) -> Stat:
        stat = super().stat(name)
        lost = "/state-" in name
        return msgspec.structs.replace(stat, num_bytes=stat.num_bytes - lost)


def test_an_upload_that_arrives_short_is_never_committed():
    storage = Broken(uuid.uuid4().hex, "")
    with pytest.raises(CheckpointError, match="arrived"):
        saved(storage, 5)
    assert checkpoint.commits(storage) == []


@pytest.mark.parametrize("num_failed", [1, 2])
def test_one_checkpoint_that_could_not_be_written_is_made_good_by_the_next_one_and_two_end_the_run(
    num_failed,
):
    refused, heard = (
        ["checkpoints/step-000000001", "checkpoints/step-000000002"][:num_failed],
        queue.Queue[str](),
    )

    def refuse(verb: str, name: str) -> None:
        if verb == "write" and name.startswith(tuple(refused)):
            raise TransientError("503")

    storage = told(MemoryStorage(uuid.uuid4().hex, ""), uuid.uuid4().hex, refuse)
    writer = checkpoint.CheckpointWriter(storage, 3, tell=heard.put)
    writer.save(state_at(1), top1=None)
    assert "step 1 could not be written: 503" in heard.get(timeout=600)
    if num_failed == 1:
        writer.save(state_at(2), top1=None)
        # waited for: the run has none but this
        assert [commit.step for commit in checkpoint.commits(storage)] == [2]
    else:
        with pytest.raises(CheckpointError, match="the last checkpoint could not be written: 503"):
            writer.save(state_at(2), top1=None)
    writer.close()


def test_a_pickle_that_calls_what_is_no_part_of_a_checkpoint_is_refused():
    state = state_at(1) | {"further": Fraction(1, 2)}  # harmless, but a call all the same
    buffer = io.BytesIO()
    torch.save(state, buffer)
    assert torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)["further"] == 0.5
    for data in (buffer.getvalue(), pickle.dumps(state), b"", b"PK\x03\x04"):
        with pytest.raises(CheckpointError, match="not a checkpoint"):
            checkpoint.state_from_bytes(data, "x")


@pytest.mark.parametrize("state", [None, 1, [], torch.zeros(2), {}, {"identity": None}])
def test_a_state_that_names_no_run_is_not_a_checkpoint(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with pytest.raises(
        CheckpointError, match=r"x: not a checkpoint \(it holds no dict with the id"
    ):
        checkpoint.state_from_bytes(buffer.getvalue(), "x")


def test_a_state_in_the_old_format_that_is_cut_anywhere_is_not_a_checkpoint():
    buffer = io.BytesIO()
    torch.save(state_at(70_000), buffer, _use_new_zipfile_serialization=False)
    for size in range(len(buffer.getvalue())):
        with pytest.raises(CheckpointError, match="x: not a checkpoint"):
            checkpoint.state_from_bytes(buffer.getvalue()[:size], "x")


@pytest.mark.parametrize("mark", [b"", b"{}", b'{"format": 3', b'{"format": 3, "crc32c": "\xe1"}'])
def test_a_checkpoint_whose_mark_is_damaged_is_passed_over_with_a_warning(mark):
    storage = MemoryStorage(uuid.uuid4().hex, "")
    saved(storage, 5, 12, top1={5: 0.5, 12: 0.9})
    put(storage, folder_of(12) + COMMIT, mark)
    for read in (checkpoint.newest, checkpoint.at):
        warnings = []
        found = read(storage, warnings.append)
        assert found is not None
        assert found[0].step == found[1]["step"] == 5
        [warning] = warnings
        assert re.fullmatch(".*step-000000012/commit.json: not a commit mark.*", warning)
    assert [commit.top1 for commit in checkpoint.commits(storage)] == [0.5]
    saved(storage, 12, 20, keep=2)
    # 5 is the best
    assert [commit.step for commit in checkpoint.commits(storage, unexpected)] == [5, 12, 20]


def test_a_checkpoint_of_another_format_is_refused_and_stays():
    # Passed over like a damaged one, it would be removed by the run that went on from an older one.
    storage = MemoryStorage(uuid.uuid4().hex, "")
    saved(storage, 5, 12)
    mark = storage.read(folder_of(12) + COMMIT).replace(b'"format":3', b'"format":4')
    put(storage, folder_of(12) + COMMIT, mark)
    for read in (checkpoint.newest, checkpoint.at):
        with pytest.raises(
            ConfigError, match=r"000012/commit\.json: .* of format 4, this .* reads format 3;"
        ):
            read(storage, unexpected)


def test_a_copy_that_a_user_keeps_beside_the_checkpoints_is_none_of_them_and_stays(
    tmp_path,
):
    storage = open_storage(str(tmp_path))
    saved(storage, 5)
    for copy in ("checkpoints/step-000000005.keep", "checkpoints/best", "checkpoints/step-5"):
        shutil.copytree(tmp_path / folder_of(5), tmp_path / copy)
    (tmp_path / "checkpoints/notes.txt").write_text("kept by hand")
    before = {stat.name for stat in storage.list()}
    own = {state_of(storage, 5), folder_of(5) + COMMIT}
    saved(storage, 12, 20, keep=2)
    after = {stat.name for stat in storage.list()}
    assert before - after == own
    assert not (tmp_path / folder_of(5)).exists()
    assert [commit.step for commit in checkpoint.commits(storage)] == [12, 20]
