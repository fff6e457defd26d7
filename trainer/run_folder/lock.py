"""Keeps a run folder to one living run: a file lock on a disk, a lease that is renewed in a bucket.

A file lock ends with its process. A lease can outlive its process, but is no longer renewed: the
next run takes it after `PATIENCE_S`, or at once if it can see that the process is gone.

The process may only have been paused, or cut off from the bucket. So a run that holds a lease
confirms it between seeing what is in the folder and changing it, and changes only the generations
that it saw: what the next run has written since stays, even where a request of the old one arrives
late.
"""

import datetime
import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError, TransientError
from shardset.prepared import JSON_ERRORS, prepared
from shardset.storage.base import ABSENT, Storage, os_errors_as_storage_errors
from trainer.errors import RunTaken

HOLDER = "holder.json"
BEAT_S = 10.0
"""How often a lease is renewed."""

PATIENCE_S = 35.0
"""A lease that has not been renewed for this long is free to take."""


@prepared
class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a run folder.

    Processes of one `machine` can see each other. `beat` counts renewals.
    """

    host: str
    pid: int
    since: str
    machine: str
    token: str
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """The hold on a run folder, until `close`.

    This one is of a folder that no other run can take meanwhile.

    `token` names it to the other hosts of the run.
    """

    token = ""

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._file = file

    def check(self) -> None:
        """Raises RunTaken if it is known that another run took the folder. Asks nobody."""

    def confirm(self) -> None:
        """Raises RunTaken unless this run holds the folder now, or StorageError if the bucket can't
        be asked.
        """

    def keep(self) -> None:
        """Confirms a hold that could be lost before another request is done."""
        self.confirm()

    def taken(self, error: BaseException) -> RunTaken | None:
        """The reason for a failed change of the folder, if that is lost by now."""
        try:
            if not isinstance(error, TransientError):
                self.confirm()
        except RunTaken as taken:
            return taken
        except StorageError:  # the bucket answers nobody: `error` tells more
            return None
        return None

    def close(self) -> None:
        """Releases the folder."""
        if self._file is not None:
            self._file.close()


UNRIVALLED = RunLock()


def acquire_run_lock(
    storage: Storage,
    tell: Callable[[str], None],
    *,
    beat_s: float = BEAT_S,
    patience_s: float = PATIENCE_S,
) -> RunLock:
    """Locks a run folder, local or remote, for this process.

    Raises ConfigError if a living run holds it.
    """
    if not storage.is_remote:
        return _locked_folder(Path(storage.url))
    return Lease(storage, this_process(), tell, beat_s=beat_s, patience_s=patience_s)


def this_process() -> Holder:
    """This process as a new holder."""
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=_machine(),
        token=uuid.uuid4().hex,
    )


def _locked_folder(folder: Path) -> RunLock:
    """A lock on the file `holder.json`, which remains when the lock is gone.

    No other process can take it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not truncated before it is locked: until then it names the process that holds it.
        file = (folder / HOLDER).open("a+b", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        with file:
            raise _refusal(str(folder), _read(file.read())) from error
    except OSError as error:
        raise ConfigError(
            f"{folder}: can't be a run folder ({error.strerror}); take another --run-dir, on a file"
            " system that has file locks or in a bucket (gs://)"
        ) from error
    with os_errors_as_storage_errors(str(folder / HOLDER)):
        file.truncate(0)
        file.write(msgspec.json.encode(this_process()))
    return RunLock(file)


class SeenLease(RunLock):
    """The object `holder.json` in the bucket, held by the process that `token` names."""

    def __init__(self, storage: Storage, token: str) -> None:
        self._storage, self.token = storage, token
        self._lost: str | None = None

    def check(self) -> None:
        if self._lost is not None:
            raise RunTaken(
                f"{self._storage.url}: this run has lost its lease: {self._lost}; the work since"
                " its last checkpoint is not saved"
            )

    def confirm(self) -> None:
        self._seen_generation()

    def _seen_generation(self) -> str:
        """The generation of the lease in the bucket.

        Raises RunTaken, now and ever after, if it is lost.
        """
        self.check()
        generation, holder = self._stored()
        if generation == ABSENT:
            self._lost = (
                f"{HOLDER} is gone: another run took the folder and has ended, or someone"
                " removed it"
            )
        elif holder is None or holder.token != self.token:
            self._lost = (
                f"it was not renewed in time, and {holder or 'another process'} took the folder"
            )
        self.check()
        return generation

    def _stored(self) -> tuple[str, Holder | None]:
        """The generation of the lease in the bucket, ABSENT if there is none, and its holder if it
        can be read.
        """
        try:
            data, stat = self._storage.read_with_stat(HOLDER)
        except NotFound:
            return ABSENT, None
        return stat.generation, _read(data)


def _awake_or_not() -> float:
    """Seconds that count while this process is stopped and, on Linux, its machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lease(SeenLease):
    """The lease of this process, renewed by a thread.

    Every change replaces exactly the generation that was read.

    Other runs can take it `patience_s` after it was last renewed, by `clock`.
    """

    def __init__(
        self,
        storage: Storage,
        who: Holder,
        tell: Callable[[str], None],
        *,
        beat_s: float,
        patience_s: float,
        clock: Callable[[], float] = _awake_or_not,
    ) -> None:
        super().__init__(storage, who.token)
        self._who, self._beat_s, self._patience_s, self._clock = who, beat_s, patience_s, clock
        self._renewing, self._closing = threading.Lock(), threading.Event()
        self._take(tell)
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        with self._renewing:
            while True:
                # Not renewed where another process was faster: then the next look says which.
                with suppress(PreconditionFailed):
                    return self._write(self._seen_generation())

    def keep(self) -> None:
        self.check()
        # The other half of the patience is for the next request and the pause before it.
        if self._clock() - self._renewed_at > self._patience_s / 2:
            self.confirm()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        # If it can't be removed, the next run waits and says so.
        with suppress(RunTaken, StorageError):
            # Only that generation: another run may take the lease before this request, or before it
            # is repeated.
            self._storage.delete(HOLDER, generation=self._seen_generation())

    def _take(self, tell: Callable[[str], None]) -> None:
        generation, holder = self._stored()
        if generation != ABSENT and not _is_gone(holder):
            who = holder or "another process"
            tell(
                f"{self._storage.url} is held by {who}; waiting up to {self._patience_s:.0f} s for"
                " a renewal"
            )
            end = time.monotonic() + self._patience_s
            while generation != ABSENT and time.monotonic() < end:
                time.sleep(min(1.0, self._patience_s / 20))
                newest, holder = self._stored()
                if newest not in (generation, ABSENT):
                    raise _refusal(self._storage.url, holder)
                generation = newest
        try:
            self._write(generation)
        except PreconditionFailed as error:
            raise _refusal(self._storage.url, self._stored()[1]) from error

    def _run(self) -> None:
        while self._lost is None and not self._closing.wait(self._beat_s):
            # The storage has retried already. The next beat tries again, or notices another run in
            # the folder.
            with suppress(StorageError, RunTaken):
                self.confirm()

    def _write(self, generation: str) -> None:
        self._who = msgspec.structs.replace(self._who, beat=self._who.beat + 1)
        began = self._clock()
        self._storage.write(HOLDER, msgspec.json.encode(self._who), if_generation=generation)
        self._renewed_at = began


def _refusal(where: str, holder: Holder | None) -> ConfigError:
    """The error of a run that may not start."""
    return ConfigError(
        f"{where}: {holder or 'another process'} writes to this run folder; two runs there would"
        " train on the same data and overwrite each other's checkpoints; stop that one, or take"
        " another --run-dir"
    )


def _read(data: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(data, type=Holder)
    except JSON_ERRORS:
        return None


def _is_gone(holder: Holder | None) -> bool:
    """Whether the holder was a process of this machine and has ended."""
    if holder is None or not holder.machine or holder.machine != _machine():
        return False
    # A reused process id delays the next run by `PATIENCE_S` at most.
    return not Path(f"/proc/{holder.pid}").exists()


def _machine() -> str:
    """The boot id and process namespace on Linux; empty elsewhere."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}" if boot.exists() else ""
