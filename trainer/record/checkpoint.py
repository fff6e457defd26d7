"""Checkpoints: device-free, whole or not there, written in the background by one writer.

A checkpoint is the folder `checkpoints/step-000000123/` with `state.pt` (see checkpoint_state.py) and `commit.json`,
written after the state has been checked. A folder without its commit does not count. A step that is saved again (after
an evaluation that was interrupted) gets its new state as `state-again.pt` beside the old one, so that at every moment
one of the two is whole and committed.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import msgspec

from shardset.checksum import crc32c_text
from shardset.errors import ConfigError, NotFound
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from trainer.errors import CheckpointError, NotFinite
from trainer.record.checkpoint_names import COMMIT, FOLDER, STATE, STATE_AGAIN, folder_of, is_folder, step_of, steps
from trainer.record.checkpoint_state import CheckpointState, checked, decode, encode

FORMAT = 1


class CommitMark(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a whole checkpoint: what it holds, and what its state file must look like.

    `identity` says which run it belongs to. `top1` is the evaluation made with these weights, if there was one.
    `state` is the state file's name in the folder.
    """

    format: int
    step: int
    epoch: int
    num_bytes: int
    crc32c: str
    top1: float | None
    identity: dict[str, Any]
    state: Literal["state.pt", "state-again.pt"] = STATE


# --- reading ---------------------------------------------------------------------------------------------------------


def commits(storage: Storage, warn: Callable[[str], None] = lambda text: None) -> list[CommitMark]:
    """The finished checkpoints of a run folder, oldest first; those with a damaged mark are passed over, and told."""
    marks = []
    for step in steps(storage):
        try:
            marks.append(_read_commit(storage, folder_of(step) + COMMIT))
        except CheckpointError as error:
            warn(f"{error}; passed over")
    return marks


def read(storage: Storage, commit: CommitMark, folder: str | None = None) -> CheckpointState:
    """The state of a finished checkpoint; raises CheckpointError if its bytes are not those that were committed."""
    name = (folder_of(commit.step) if folder is None else folder) + commit.state
    where = f"{storage.url}/{name}"
    try:
        data = storage.read(name)
    except NotFound as error:
        raise CheckpointError(f"{where}: the checkpoint is committed but its state is gone") from error
    num_bytes, crc32c = len(data), crc_of(data)
    if (num_bytes, crc32c) != (commit.num_bytes, commit.crc32c):
        raise CheckpointError(
            f"{where}: {num_bytes} bytes with CRC32C {crc32c}, expected {commit.num_bytes} with {commit.crc32c}: "
            "it was cut or changed after it was written"
        )
    state = checked(decode(data, where), where)
    if state["step"] != commit.step:
        raise CheckpointError(f"{where}: the state of step {state['step']}, expected that of step {commit.step}")
    return state


def newest(storage: Storage, warn: Callable[[str], None]) -> tuple[CommitMark, CheckpointState] | None:
    """The newest whole checkpoint of a run folder, None if there never was one.

    Damaged ones are passed over with a warning. Raises CheckpointError if there are checkpoints and none is whole.
    """
    for commit in reversed(commits(storage, warn)):
        try:
            return commit, read(storage, commit)
        except CheckpointError as error:
            warn(f"{error}; trying the one before it")
    if count := len(steps(storage)):
        raise CheckpointError(
            f"{storage.url}/{FOLDER}: none of {count} checkpoints is whole; begin anew in another --run-dir"
        )
    return None


def at(storage: Storage, warn: Callable[[str], None]) -> tuple[CommitMark, CheckpointState]:
    """The checkpoint that a URL means: that folder itself, or the newest whole one of a run folder."""
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
    """The evaluated checkpoint with the highest top-1, the earliest of equals."""
    return max((commit for commit in marks if commit.top1 is not None), key=lambda c: (c.top1, -c.step), default=None)


def check_identity(saved: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises CheckpointError, naming each difference, unless a checkpoint belongs to the run that wants it."""
    names = [name for name in wanted if saved.get(name) != wanted[name]]
    if names:
        differences = "; ".join(f"{name} is {saved.get(name)!r} there and {wanted[name]!r} here" for name in names)
        raise CheckpointError(
            f"{where}: belongs to another run: {differences}; give the same or take another --run-dir"
        )


def _read_commit(storage: Storage, name: str) -> CommitMark:
    """Raises CheckpointError if the mark is damaged, ConfigError if only another version can read its checkpoint."""
    data = storage.read(name)
    try:
        commit = msgspec.json.decode(data, type=CommitMark)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{storage.url}/{name}: not a commit mark ({error})") from error
    if commit.format != FORMAT:
        raise ConfigError(
            f"{storage.url}/{name}: a checkpoint of format {commit.format}, this version of shardset reads format "
            f"{FORMAT}; go on with the version that wrote it, or begin in another --run-dir"
        )
    return commit


def crc_of(data: bytes) -> str:
    """CRC32C of the bytes as GCS spells it."""
    return crc32c_text(google_crc32c.value(data))


# --- writing ---------------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes checkpoints to a run folder in the background, one at a time, and keeps the newest `keep` and the best.

    `before_commit` is called, in the background too, when a state has arrived and before it counts. A failure is
    told at once. It is made good by the next state, for which `save` waits then; else `save` or `close` raises it.
    """

    def __init__(
        self,
        storage: Storage,
        keep: int,
        before_commit: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._storage = storage
        self._keep = keep
        self._before_commit = before_commit
        self._tell = tell
        self._error: BaseException | None = None
        self._queue: queue.Queue[tuple[CommitMark, CheckpointState] | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def save(self, state: CheckpointState, *, top1: float | None) -> None:
        """Takes over a state (`step`, `epoch`, `identity`, and more); waits while an earlier one is being written.

        Raises CheckpointError if neither the one before nor this one could be written.
        """
        blank = CommitMark(
            format=FORMAT,
            step=state["step"],
            epoch=state["epoch"],
            num_bytes=0,
            crc32c="",
            top1=top1,
            identity=state["identity"],
        )
        has_failed = self._error is not None
        self._queue.put((blank, state))
        if has_failed:
            self._queue.join()
            self._raise_error()

    def close(self) -> None:
        """Returns when everything is written; raises what went wrong."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"the last checkpoint could not be written: {error}") from error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                write(self._storage, *item, self._before_commit)
                retain(self._storage, self._keep)
                self._error = None
            except BaseException as error:  # noqa: BLE001 - raised by the next `save` or `close`, which wait for us
                self._error = error
                self._tell(f"the checkpoint of step {item[0].step} could not be written: {error}; the next one is due")
            finally:
                self._queue.task_done()


def write(
    storage: Storage, blank: CommitMark, state: CheckpointState, before_commit: Callable[[], None] = lambda: None
) -> CommitMark:
    """Writes and checks a state, then commits it; returns the commit. Raises NotFinite if a weight is no number."""
    _check_weights(state)
    folder = folder_of(blank.step)
    data = encode(state)
    replaced = _standing(storage, folder)
    name = STATE_AGAIN if replaced == STATE else STATE
    commit = msgspec.structs.replace(blank, num_bytes=len(data), crc32c=crc_of(data), state=name)
    _put(storage, folder + name, data)
    _check(storage, folder + name, commit)
    before_commit()
    _put(storage, folder + COMMIT, msgspec.json.encode(commit))
    if replaced is not None:
        storage.delete(folder + replaced)
    return commit


def _check_weights(state: CheckpointState) -> None:
    # The update can spoil weights after a loss that was a number; every run that goes on from them would end.
    weights = [*state["model"].items(), *(state.get("ema") or {}).items()]
    bad = [name for name, value in weights if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        raise NotFinite(
            f"{len(bad)} weights of step {state['step']} are not finite, {bad[0]!r} first; lower the learning rate, or "
            "clip gradients with --set regularize.clip_norm=1"
        )


def _standing(storage: Storage, folder: str) -> str | None:
    """The state file of the checkpoint that stands there, None if there is none or its mark is damaged."""
    try:
        return _read_commit(storage, folder + COMMIT).state
    except (NotFound, CheckpointError):
        return None


def retain(storage: Storage, keep: int) -> None:
    """Deletes all checkpoints but the newest `keep` and the best, and what has no mark or a damaged one.

    What has not the name of a checkpoint, such as a copy that a user keeps, stays.
    """
    marks = commits(storage)
    kept = {commit.step for commit in [*marks[-keep:], *filter(None, [best(marks)])]}
    names = [stat.name for stat in storage.list(FOLDER)]
    doomed = [name for name in names if (step := step_of(name)) is not None and step not in kept]
    # Commits first: a kill in between leaves a state without a commit, never the reverse.
    for name in sorted(doomed, key=lambda name: not name.endswith(COMMIT)):
        storage.delete(name)
    if not storage.is_remote:
        _remove_empty_folders(Path(storage.url))


def sweep(storage: Storage) -> None:
    """Removes what a run that was killed while it wrote a checkpoint has left; for who holds the run folder."""
    open_storage(f"{storage.url}/{FOLDER}").sweep()
    if not storage.is_remote:
        _remove_empty_folders(Path(storage.url))


def _remove_empty_folders(run: Path) -> None:
    """Removes what a disk, other than a bucket, keeps of a checkpoint that was deleted: it looks like one."""
    for folder in run.glob(f"{FOLDER}*/"):
        if is_folder(f"{FOLDER}{folder.name}/") and not any(folder.iterdir()):
            folder.rmdir()


def _put(storage: Storage, name: str, data: bytes) -> None:
    with storage.writer(name) as writer:
        writer.write(data)


def _check(storage: Storage, name: str, commit: CommitMark) -> None:
    """Raises CheckpointError unless the storage holds what was sent, by size and by CRC32C where it keeps one."""
    stat = storage.stat(name)
    if stat.num_bytes != commit.num_bytes or stat.crc32c not in (None, commit.crc32c):
        raise CheckpointError(
            f"{storage.url}/{name}: {stat.num_bytes} bytes with CRC32C {stat.crc32c} arrived, "
            f"expected {commit.num_bytes} with {commit.crc32c}"
        )
