"""Checkpoints: independent of the devices, committed as a whole, written in the background.

A checkpoint is the folder `checkpoints/step-000000123/` with a state file (see checkpoint_state.py) and `commit.json`,
which is written once the stored state has been verified. A folder without a commit mark does not count. Each save has
a name of its own for its state, so saving a step again replaces nothing but the mark.

A run that was paused may find its folder taken by another one. So every change is made in three moves: see what stands
there, confirm the lock, change only that generation. What another run has written since is never replaced or deleted.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from shardset.errors import ConfigError, DamagedShard, NotFound
from shardset.prepared import prepared
from shardset.storage.base import ABSENT, Storage
from shardset.storage.checked import facts_of, read_object
from shardset.storage.open import open_storage
from trainer.errors import CheckpointError, NotFinite, RunTaken
from trainer.record.checkpoint_names import COMMIT, FOLDER, folder_of, is_state, new_state_name, step_of, steps
from trainer.record.checkpoint_state import CheckpointState, decode, encode
from trainer.supervise.run_lock import UNRIVALLED, RunLock

FORMAT = 1


@prepared
class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The state file of a checkpoint as it was stored."""

    name: str
    num_bytes: int
    crc32c: str


@prepared
class CommitMark(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `commit.json`: what the checkpoint is, and the size and checksum of its state file.

    `identity` names the run that the checkpoint belongs to. `top1` is the accuracy of these weights, if they were
    evaluated.
    """

    format: int
    step: int
    epoch: int
    top1: float | None
    identity: dict[str, Any]
    file: StoredFile


# --- reading ---------------------------------------------------------------------------------------------------------


def commits(storage: Storage, warn: Callable[[str], None] = lambda text: None) -> list[CommitMark]:
    """The commit marks in a run folder, oldest first. Warns about a damaged mark and leaves it out."""
    marks = []
    for step in steps(storage):
        try:
            marks.append(_read_commit(storage, folder_of(step) + COMMIT))
        except CheckpointError as error:
            warn(f"{error}; skipping this checkpoint")
        except NotFound:  # deleted since it was listed
            continue
    return marks


def read(storage: Storage, commit: CommitMark, folder: str | None = None) -> CheckpointState:
    """The state of a committed checkpoint. Raises CheckpointError unless its bytes are those that were committed."""
    inside = folder_of(commit.step) if folder is None else folder
    where = f"{storage.url}/{inside}{commit.file.name}"
    state = decode(_read_file(storage, inside, commit.file), where)
    if state["step"] != commit.step:
        raise CheckpointError(f"{where}: the state of step {state['step']}, expected that of step {commit.step}")
    return state


def _read_file(storage: Storage, folder: str, file: StoredFile) -> bytes:
    name = folder + file.name
    try:
        return read_object(storage, name, file.num_bytes, file.crc32c, "it was cut or changed after it was written")
    except NotFound as error:
        raise CheckpointError(
            f"{storage.url}/{name}: the checkpoint is committed, but its state file is gone"
        ) from error
    except DamagedShard as error:
        raise CheckpointError(str(error)) from error


def newest(storage: Storage, warn: Callable[[str], None]) -> tuple[CommitMark, CheckpointState] | None:
    """The newest intact checkpoint of a run folder; None if it has no checkpoints.

    Warns about damaged checkpoints and skips them. Raises CheckpointError if all of them are damaged.
    """
    for commit in reversed(commits(storage, warn)):
        try:
            return commit, read(storage, commit)
        except CheckpointError as error:
            warn(f"{error}; trying the one before it")
    if count := len(steps(storage)):
        raise CheckpointError(
            f"{storage.url}/{FOLDER}: none of {count} checkpoints is intact; start again in another --run-dir"
        )
    return None


def at(storage: Storage, warn: Callable[[str], None]) -> tuple[CommitMark, CheckpointState]:
    """The checkpoint at a URL: that folder itself if it is a checkpoint, else the newest intact one of a run folder."""
    try:
        commit = _read_commit(storage, COMMIT)
        return commit, read(storage, commit, folder="")
    except NotFound:
        checkpoint = newest(storage, warn)
        if checkpoint is None:
            raise CheckpointError(f"{storage.url}: neither a checkpoint nor a run folder with checkpoints") from None
        return checkpoint
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; name another checkpoint, or its run folder for the newest whole one"
        ) from error


def best(marks: Iterable[CommitMark]) -> CommitMark | None:
    """The evaluated checkpoint with the highest top-1; the earliest of several."""
    return max((commit for commit in marks if commit.top1 is not None), key=lambda c: (c.top1, -c.step), default=None)


def check_identity(saved: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises CheckpointError, naming every difference, unless a checkpoint belongs to this run."""
    names = [name for name in wanted if saved.get(name) != wanted[name]]
    if names:
        differences = "; ".join(f"{name} is {saved.get(name)!r} there and {wanted[name]!r} here" for name in names)
        raise CheckpointError(
            f"{where}: belongs to another run: {differences}; use the same settings, or another --run-dir"
        )


def _read_commit(storage: Storage, name: str) -> CommitMark:
    """Raises CheckpointError for a damaged mark, ConfigError for a format of another version."""
    data = storage.read(name)
    try:
        commit = msgspec.json.decode(data, type=CommitMark)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{storage.url}/{name}: not a commit mark ({error})") from error
    # Not a CheckpointError: the checkpoint would be skipped as damaged, and deleted by a run that goes on without it.
    if commit.format != FORMAT:
        raise ConfigError(
            f"{storage.url}/{name}: a checkpoint of format {commit.format}, this version of shardset reads format "
            f"{FORMAT}; continue with the version that wrote it, or start again in another --run-dir"
        )
    return commit


# --- writing ---------------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes checkpoints to a run folder on a background thread; keeps the newest `keep` and the best.

    The thread calls `before_commit` when a state is stored but not yet committed, and `tell` when a checkpoint could
    not be written. One failure is forgiven if the next checkpoint succeeds; else `save` or `close` raises it. The loss
    of `lock` is not forgiven: nothing is written or deleted after it.
    """

    def __init__(
        self,
        storage: Storage,
        keep: int,
        before_commit: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda text: None,
        lock: RunLock = UNRIVALLED,
    ) -> None:
        self._storage = storage
        self._lock = lock
        self._keep = keep
        self._before_commit = before_commit
        self._tell = tell
        self._error: BaseException | None = None
        # At most one state waits while another is written: each is a copy of the whole model.
        self._queue: queue.Queue[tuple[CheckpointState, float | None] | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def save(self, state: CheckpointState, *, top1: float | None) -> None:
        """Takes over a state to write; waits while an earlier one is being written.

        After a failure it waits until this state is written, and raises CheckpointError if that fails too, or RunTaken.
        """
        has_failed = self._error is not None
        self._queue.put((state, top1))
        if has_failed:
            self._queue.join()
            self._raise_error()

    def close(self) -> None:
        """Returns when everything is written. Raises CheckpointError or RunTaken if the last state could not be."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, RunTaken):
                raise error
            raise CheckpointError(f"the last checkpoint could not be written: {error}") from error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            state, top1 = item
            try:
                write(self._storage, state, top1, self._before_commit, self._lock)
                retain(self._storage, self._keep, self._lock)
                self._error = None
            except BaseException as error:  # noqa: BLE001 - raised by the next `save` or `close`, which wait for us
                self._error = self._lock.reason(error)
                if not isinstance(self._error, RunTaken):
                    self._tell(
                        f"the checkpoint of step {state['step']} could not be written: {error}; the next one is due"
                    )
            finally:
                self._queue.task_done()


def write(
    storage: Storage,
    state: CheckpointState,
    top1: float | None,
    before_commit: Callable[[], None] = lambda: None,
    lock: RunLock = UNRIVALLED,
) -> None:
    """Stores a state, verifies what is stored, then commits it. Raises NotFinite if a weight is not finite.

    The state of an earlier save of this step stays until `retain`.
    """
    folder = folder_of(state["step"])
    file = _store(storage, folder, new_state_name(), state, lock)
    before_commit()
    mark = CommitMark(
        format=FORMAT,
        step=state["step"],
        epoch=state["epoch"],
        top1=top1,
        identity=state["identity"],
        file=file,
    )
    seen = _generation(storage, folder + COMMIT)
    lock.confirm()
    _put(storage, folder + COMMIT, msgspec.json.encode(mark), seen)


def _store(storage: Storage, folder: str, name: str, state: CheckpointState, lock: RunLock) -> StoredFile:
    """Stores a state, and verifies what is stored."""
    _check_weights(state)
    data = encode(state)
    num_bytes, crc32c = facts_of(data)
    file = StoredFile(name=name, num_bytes=num_bytes, crc32c=crc32c)
    lock.keep()
    _put(storage, folder + name, data)
    _verify(storage, folder, file)
    return file


def _check_weights(state: CheckpointState) -> None:
    # An update can spoil the weights although its loss was finite. Every run resumed from them would fail.
    weights = [*state["model"].items(), *(state.get("ema") or {}).items()]
    bad = [name for name, value in weights if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        raise NotFinite(
            f"{len(bad)} weights of step {state['step']} are not finite, {bad[0]!r} first; lower the learning rate, or "
            "clip gradients with --set regularize.clip_norm=1"
        )


def _generation(storage: Storage, name: str) -> str:
    try:
        return storage.stat(name).generation
    except NotFound:
        return ABSENT


def _put(storage: Storage, name: str, data: bytes, generation: str | None = None) -> None:
    # On a disk the lock can't be lost, and a file system may lack the hard links that ABSENT takes there.
    with storage.writer(name, if_generation=generation if storage.is_remote else None) as writer:
        writer.write(data)


def _verify(storage: Storage, folder: str, file: StoredFile) -> None:
    """Raises CheckpointError unless the storage holds what was sent: its size, and its CRC32C where it keeps one."""
    stat = storage.stat(folder + file.name)
    if stat.num_bytes != file.num_bytes or stat.crc32c not in (None, file.crc32c):
        raise CheckpointError(
            f"{storage.url}/{folder}{file.name}: {stat.num_bytes} bytes with CRC32C {stat.crc32c} arrived, "
            f"expected {file.num_bytes} with {file.crc32c}"
        )


def retain(storage: Storage, keep: int, lock: RunLock = UNRIVALLED) -> None:
    """Deletes all checkpoints but the newest `keep` and the best, and what saves left that never got their mark.

    Also deletes checkpoints whose mark is damaged, or names a file that is gone. Keeps everything that is not named
    like a checkpoint, such as a copy that a user made.
    """
    stored, marks = _stored(storage), commits(storage)
    states = {folder_of(mark.step) + mark.file.name: mark for mark in marks}
    whole = [mark for name, mark in states.items() if name in stored]
    kept = {mark.step for mark in [*whole[-keep:], *filter(None, [best(whole)])]}
    doomed = [name for name in stored if step_of(name) not in kept or (is_state(name) and name not in states)]
    # Commit marks first: a kill in between leaves a state without a mark, never the reverse.
    _delete(storage, {name: stored[name] for name in sorted(doomed, key=lambda name: not name.endswith(COMMIT))}, lock)


def sweep(storage: Storage, lock: RunLock = UNRIVALLED) -> None:
    """Removes what a killed run left of a checkpoint that it was writing. The caller must hold the run lock.

    What it left beside a mark goes by `retain`, once a newer checkpoint stands: a request of that run which is still on
    its way may replace the mark by one of that state.
    """
    open_storage(f"{storage.url}/{FOLDER}").sweep()
    stored = _stored(storage)
    marked = {step_of(name) for name in stored if name.endswith(COMMIT)}
    left = {name: stored[name] for name in stored if is_state(name) and step_of(name) not in marked}
    _delete(storage, left, lock)


def _stored(storage: Storage) -> dict[str, str]:
    """The generation of each file of a checkpoint."""
    return {stat.name: stat.generation for stat in storage.list(FOLDER) if step_of(stat.name) is not None}


def _delete(storage: Storage, doomed: dict[str, str], lock: RunLock) -> None:
    """Deletes files at the generations that were seen, in that order."""
    for name, generation in doomed.items():
        lock.confirm()
        storage.delete(name, generation=generation)
    _remove_empty_folders(storage)


def _remove_empty_folders(storage: Storage) -> None:
    """Removes the empty folders that a disk, unlike a bucket, keeps of deleted checkpoints."""
    for folder in () if storage.is_remote else Path(storage.url).glob(f"{FOLDER}*/"):
        if step_of(f"{FOLDER}{folder.name}/") is not None and not any(folder.iterdir()):
            folder.rmdir()
