"""Checkpoints: independent of the devices, committed in one step, written in the background.

A checkpoint is the folder `checkpoints/step-000000123/` with a state file (see checkpoint_state.py)
and `commit.json`, which is written once the stored state has been verified. A folder without a
commit mark does not count. Each save has a separate name for its state, so saving a step again
replaces nothing but the mark.

A run that was paused may find its folder taken by another one. So every change is made in three
moves: see what stands there, confirm the lock, change only that generation. What another run has
written since is never replaced or deleted.
"""

import fcntl
import glob
import io
import os
import re
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from shardset.errors import ConfigError, DamagedShard, NotFound
from shardset.prepared import JSON_ERRORS, prepared
from shardset.storage.base import ABSENT, Storage, try_to_delete
from shardset.storage.checked import facts_of, read_object
from shardset.storage.open import open_storage
from shardset.stream.world import num_local_processes
from trainer.errors import UNREADABLE, CheckpointError, NotFinite, RunTaken
from trainer.run_folder.checkpoint_state import CheckpointState
from trainer.run_folder.lock import UNRIVALLED, RunLock
from trainer.run_folder.names import CHECKPOINTS, COMMIT, folder_of, step_of, steps, steps_among

FORMAT = 3

_STATE = re.compile(r".*/state-[0-9a-f]{12}\.pt")


@prepared
class _AnyFormat(msgspec.Struct):
    """What the marks of all versions have."""

    format: int


@prepared
class CommitMark(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `commit.json`: what the checkpoint is, and the name, size and checksum of its
    state file.

    `identity` names the run that the checkpoint belongs to. `top1` is the accuracy of these
    weights, if they were evaluated.
    """

    format: int
    step: int
    epoch: int
    top1: float | None
    identity: dict[str, Any]
    state: str
    num_bytes: int
    crc32c: str


# --- reading --------------------------------------------------------------------------------------


def commits(
    storage: Storage,
    warn: Callable[[str], None] = lambda text: None,
    among: Iterable[int] | None = None,
) -> list[CommitMark]:
    """The commit marks in a run folder, or of some steps, oldest first.

    Warns about a damaged mark and leaves it out.
    """
    marks = []
    for step in steps(storage) if among is None else among:
        try:
            marks.append(_read_commit(storage, folder_of(step) + COMMIT))
        except CheckpointError as error:
            warn(f"{error}; skipping this checkpoint")
        except NotFound:  # deleted since it was listed
            continue
    return marks


def read(storage: Storage, commit: CommitMark, folder: str | None = None) -> CheckpointState:
    """The state of a committed checkpoint.

    Raises CheckpointError unless its bytes are those that were committed.
    """
    name = (folder_of(commit.step) if folder is None else folder) + commit.state
    where = f"{storage.url}/{name}"
    try:
        data = _stored_bytes(storage, name, commit)
    except NotFound as error:
        raise CheckpointError(
            f"{where}: the checkpoint is committed, but its state file is gone"
        ) from error
    except DamagedShard as error:
        raise CheckpointError(str(error)) from error
    return state_from_bytes(data, where)


def _stored_bytes(storage: Storage, name: str, commit: CommitMark) -> bytes:
    """A state file. Of the processes of a machine one reads it from a bucket, for all of them."""
    facts = commit.num_bytes, commit.crc32c
    read = partial(read_object, storage, name, *facts, "it was cut or changed after it was written")
    if not storage.is_remote or num_local_processes() == 1:
        return read()
    data, private = b"", partial(os.open, mode=0o600)
    # Without room on the disk, each reads it for itself.
    with suppress(OSError), open(_shared(commit.state), "a+b", opener=private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        data = file.read()
        if facts_of(data) != facts:
            data = read()
            file.truncate(0)
            file.write(data)
    return data or read()


def _shared(name: str) -> str:
    return f"{tempfile.gettempdir()}/shardset-{os.getuid()}-{name}"


def drop_shared() -> None:
    """Deletes what the processes of this machine share. Call it when all have read it."""
    for path in glob.glob(_shared("state-*")):
        Path(path).unlink(missing_ok=True)


def newest(
    storage: Storage, warn: Callable[[str], None]
) -> tuple[CommitMark, CheckpointState] | None:
    """The newest intact checkpoint of a run folder; None if it has no checkpoints.

    Warns about damaged checkpoints and skips them. Raises CheckpointError if all of them are
    damaged.
    """
    existing = steps(storage)
    for commit in reversed(commits(storage, warn, existing)):
        try:
            return commit, read(storage, commit)
        except CheckpointError as error:
            warn(f"{error}; trying the one before it")
    if existing:
        raise CheckpointError(
            f"{storage.url}/{CHECKPOINTS}: none of {len(existing)} checkpoints is intact; start"
            " again in another --run-dir"
        )
    return None


def at(storage: Storage, warn: Callable[[str], None]) -> tuple[CommitMark, CheckpointState]:
    """The checkpoint at a URL: that folder itself if it is a checkpoint, else the newest intact one
    of a run folder.
    """
    try:
        commit = _read_commit(storage, COMMIT)
        return commit, read(storage, commit, folder="")
    except NotFound:
        checkpoint = newest(storage, warn)
        if checkpoint is None:
            raise CheckpointError(
                f"{storage.url}: neither a checkpoint nor a run folder with checkpoints"
            ) from None
        return checkpoint
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; name another checkpoint, or its run folder for the newest whole one"
        ) from error


def best(marks: Iterable[CommitMark]) -> CommitMark | None:
    """The evaluated checkpoint with the highest top-1; the earliest of several."""
    return max(
        (commit for commit in marks if commit.top1 is not None),
        key=lambda c: (c.top1, -c.step),
        default=None,
    )


def chosen(storage: Storage) -> tuple[CommitMark, CheckpointState]:
    """The best checkpoint of a run folder, else the newest intact one.

    Prints what is wrong with others.
    """
    commit = best(commits(storage, print))
    return (commit, read(storage, commit)) if commit else at(storage, print)


def _read_commit(storage: Storage, name: str) -> CommitMark:
    """Raises CheckpointError for a damaged mark, ConfigError for a format of another version."""
    data = storage.read(name)
    try:
        version = msgspec.json.decode(data, type=_AnyFormat).format
        commit = msgspec.json.decode(data, type=CommitMark) if version == FORMAT else None
    except JSON_ERRORS as error:
        raise CheckpointError(f"{storage.url}/{name}: not a commit mark ({error})") from error
    # Not a CheckpointError: the checkpoint would be skipped as damaged, and deleted by a run that
    # continues without it.
    if commit is None:
        raise ConfigError(
            f"{storage.url}/{name}: a checkpoint of format {version}, this version of shardset"
            f" reads format {FORMAT}; continue with the version that wrote it, or start again in"
            " another --run-dir"
        )
    return commit


def state_to_bytes(state: CheckpointState) -> bytes:
    """The bytes of a state file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def state_from_bytes(data: bytes, where: str) -> CheckpointState:
    """The state in those bytes, on the CPU. Raises CheckpointError for another file; runs no code
    that is in it.
    """
    try:
        state: CheckpointState = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not isinstance(state.get("identity"), dict):
            raise ValueError("it holds no dict with the identity of a run")
    except UNREADABLE as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")
        raise CheckpointError(
            f"{where}: not a checkpoint ({reason}); resume from another one"
        ) from error
    return state


# --- resuming -------------------------------------------------------------------------------------


def find_checkpoint(
    folder: Storage, resume: str, note: Callable[[str], None]
) -> tuple[str, CheckpointState] | None:
    """Where the checkpoint is that `config.resume` selects for a run folder, and its state; None
    for a fresh start.

    Raises ConfigError if this would mix two runs, or take a run back to an earlier step in its own
    folder.
    """
    last = newest(folder, note)
    if resume == "never" and last is not None:
        raise ConfigError(
            f"{folder.url} holds a run up to step {last[0].step}; --resume never would mix two"
            " runs; take another --run-dir, or --resume auto"
        )
    if resume in ("auto", "never"):
        return None if last is None else (folder.url, last[1])
    if last is None:
        return resume, at(open_storage(resume), note)[1]
    url, step = open_storage(resume).url, last[0].step
    if not f"{url}/".startswith(f"{folder.url}/"):
        note(f"{folder.url} already has checkpoints: it resumes from them, not from {resume}")
    elif f"{url}/" not in (f"{folder.url}/", f"{folder.url}/{folder_of(step)}"):
        raise ConfigError(
            f"{folder.url} holds a run up to step {step}, so it can't resume from {url}, whose"
            " steps come before; take another --run-dir"
        )
    return folder.url, last[1]


# --- writing --------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes checkpoints to a run folder on a background thread; keeps the newest `keep` and the
    best.

    The thread calls `before_commit` when a state is stored but not yet committed, and `tell` when a
    checkpoint could not be written. One failure is forgiven if the next checkpoint succeeds; else
    `save` or `close` raises it. The loss of `lock` is not forgiven: nothing is written or deleted
    after it.
    """

    def __init__(
        self,
        storage: Storage,
        keep: int,
        before_commit: Callable[[], object] = lambda: None,
        tell: Callable[[str], None] = lambda text: None,
        lock: RunLock = UNRIVALLED,
    ) -> None:
        self._storage, self._keep, self._lock = storage, keep, lock
        self._before_commit, self._tell = before_commit, tell
        self._has_told_of_kept = False
        # What a killed run left of a file that it was writing.
        open_storage(f"{storage.url}/{CHECKPOINTS}").sweep()
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._newest: Future[None] | None = None

    def save(self, state: CheckpointState, *, top1: float | None) -> None:
        """Takes over a state to write, once the one before it is written.

        If that failed, waits until this state is written, and raises CheckpointError if that fails
        too, or RunTaken.
        """
        has_failed = self._newest is not None and self._newest.exception() is not None
        self._newest = self._executor.submit(self._write, state, top1)
        if has_failed:
            self._raise_error()

    def close(self) -> None:
        """Returns when everything is written.

        Raises CheckpointError or RunTaken if the last state could not be.
        """
        self._executor.shutdown()
        self._raise_error()

    def _raise_error(self) -> None:
        newest, self._newest = self._newest, None
        error = None if newest is None else newest.exception()
        if isinstance(error, RunTaken):
            raise error
        if error is not None:
            raise CheckpointError(f"the last checkpoint could not be written: {error}") from error

    def _write(self, state: CheckpointState, top1: float | None) -> None:
        try:
            self._store(state, top1)
            self._retain()
        except BaseException as error:
            if (taken := self._lock.taken(error)) is not None:
                raise taken from None
            step = state["step"]
            self._tell(
                f"the checkpoint of step {step} could not be written: {error}; the next one is due"
            )
            raise

    def _store(self, state: CheckpointState, top1: float | None) -> None:
        """Stores a state, verifies what is stored, then commits it.

        The state of an earlier save of this step stays.
        """
        # An update can spoil the weights although its loss was finite. Every run resumed from them
        # would fail.
        weights = [*state["model"].items(), *(state.get("ema") or {}).items()]
        bad = [
            name
            for name, value in weights
            if value.is_floating_point() and not value.isfinite().all()
        ]
        if bad:
            raise NotFinite(
                f"{len(bad)} weights of step {state['step']} are not finite, {bad[0]!r} first;"
                " lower the learning rate, or clip gradients with --set regularize.clip_norm=1"
            )
        data = state_to_bytes(state)
        num_bytes, crc32c = facts_of(data)
        folder, name = folder_of(state["step"]), new_state_name()
        self._lock.keep()
        self._storage.write(folder + name, data)
        stat = self._storage.stat(folder + name)
        if stat.num_bytes != num_bytes or stat.crc32c not in (None, crc32c):
            raise CheckpointError(
                f"{self._storage.url}/{folder}{name}: {stat.num_bytes} bytes with CRC32C"
                f" {stat.crc32c} arrived, expected {num_bytes} with {crc32c}"
            )
        self._before_commit()
        mark = CommitMark(
            format=FORMAT,
            step=state["step"],
            epoch=state["epoch"],
            top1=top1,
            identity=state["identity"],
            state=name,
            num_bytes=num_bytes,
            crc32c=crc32c,
        )
        try:
            seen = self._storage.stat(folder + COMMIT).generation
        except NotFound:
            seen = ABSENT
        self._lock.confirm()
        # On a disk the lock can't be lost, and a file system may lack the hard links that ABSENT
        # takes there.
        seen_remotely = seen if self._storage.is_remote else None
        self._storage.write(folder + COMMIT, msgspec.json.encode(mark), if_generation=seen_remotely)

    def _retain(self) -> None:
        """Deletes all checkpoints but the newest `keep` and the best, and what saves left that
        never got their mark.

        Also deletes checkpoints whose mark is damaged, or names a file that is gone. Keeps
        everything that is not named like a checkpoint, such as a copy that a user made, and what
        the storage does not let it delete, of which it tells once.
        """
        # One listing for what is kept and what is not: an outdated second one would doom what it
        # lacks.
        generations = {stat.name: stat.generation for stat in self._storage.list(CHECKPOINTS)}
        marks = commits(self._storage, among=steps_among(generations))
        states = {folder_of(mark.step) + mark.state: mark for mark in marks}
        whole = [mark for name, mark in states.items() if name in generations]
        kept = {mark.step for mark in [*whole[-self._keep :], *filter(None, [best(whole)])]}
        files = [name for name in generations if step_of(name) is not None]
        unmarked = {name for name in files if _STATE.fullmatch(name) and name not in states}
        doomed = [name for name in files if step_of(name) not in kept or name in unmarked]
        # Commit marks first: a kill in between leaves a state without a mark, never the reverse.
        stuck = set[int | None]()
        for name in sorted(doomed, key=lambda name: not name.endswith(COMMIT)):
            if step_of(name) in stuck:
                continue
            self._lock.confirm()
            if error := try_to_delete(self._storage, name, generation=generations[name]):
                stuck.add(step_of(name))
                if not self._has_told_of_kept:
                    self._has_told_of_kept = True
                    self._tell(f"old checkpoints that can't be removed stay: {error}")
        if not self._storage.is_remote:  # a disk keeps the folders of what was deleted
            for folder in Path(self._storage.url).glob(f"{CHECKPOINTS}step-*/"):
                with suppress(OSError):  # it has files
                    folder.rmdir()


def new_state_name() -> str:
    """`state-1f0c5a7be2d9.pt`: no other save has this name, be it of another run or of the same
    step again.
    """
    return f"state-{uuid.uuid4().hex[:12]}.pt"
