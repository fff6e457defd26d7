"""A run folder as a process writes it, and its copy in a bucket. Importing this needs no torch."""

import json
import shutil
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardset.errors import NotFound, ShardsetError, TransientError
from shardset.storage.base import ABSENT, Storage, os_errors_as_storage_errors
from shardset.storage.local import LocalStorage
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.errors import RunTaken
from trainer.run_folder.lock import UNRIVALLED, RunLock
from trainer.run_folder.names import LOGS, METRICS, log_name

UPLOAD_EVERY_S, UPLOAD_BYTES_PER_S = 30.0, 128 << 10
"""How often growing files are copied to a bucket; large ones, always completely, less often."""


class RunFolder:
    """`local` is the folder that this process writes to; `storage` is where the files end up.

    They are the same folder for a local run. For a remote run, construction fetches the files that
    this host appends to, a thread copies changed files, and `flush` copies them at once. Storage
    failures are kept until `close` raises them: a log must never stop a step. A run that has lost
    `lock` copies nothing.
    """

    def __init__(self, storage: Storage, host: int = 0, lock: RunLock = UNRIVALLED) -> None:
        self._lock = lock
        self.storage = storage.on_retry(lock.keep)
        self._is_remote = storage.is_remote
        self.local = Path(tempfile.mkdtemp(prefix="run-") if self._is_remote else storage.url)
        self._files = LocalStorage(str(self.local.absolute()))
        (self.local / LOGS).mkdir(parents=True, exist_ok=True)
        self._sent: dict[Path, tuple[int, int]] = {}
        self._error: ShardsetError | None = None
        self.pause_s = UPLOAD_EVERY_S
        self._uploading = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run folder", daemon=True)
        if self._is_remote:
            for name in (log_name(host), METRICS) if host == 0 else (log_name(host),):
                with suppress(NotFound), os_errors_as_storage_errors(str(self.local / name)):
                    (self.local / name).write_bytes(self.storage.read(name))
            self._thread.start()

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a complete file. Raises StorageError if the disk can't take it."""
        self._files.write(name, content.encode() if isinstance(content, str) else content)

    def write_records(
        self, config: TrainConfig | None, order: str | None, classes: Sequence[str]
    ) -> None:
        """Writes config, order and classes of a run that was accepted; None keeps the recorded
        config.
        """
        if config is not None:
            self.write(configs.RECORD, configs.to_json(configs.from_anywhere(config)) + "\n")
        if order is not None:
            self.write(configs.ORDER, order + "\n")
        self.write(configs.CLASSES, json.dumps(classes) + "\n")

    def flush(self) -> None:
        """Copies what has changed since the last copy; does nothing for a local run."""
        if self._is_remote:
            self._upload()

    def close(self) -> None:
        """Copies what is left.

        If that fails, raises the error, names the local folder, and keeps it.
        """
        if not self._is_remote:
            return
        self._closing.set()
        self._thread.join()
        if self._error is not None:
            advice = (
                f"before the run resumes, copy what is missing from {self.local} to"
                f" {self.storage.url}"
            )
            if isinstance(self._error, RunTaken):
                advice = f"its last logs are in {self.local}"
            raise type(self._error)(f"{self._error}; {advice}") from self._error
        shutil.rmtree(self.local)

    def _run(self) -> None:
        while not self._closing.wait(self.pause_s):
            self._upload()
        self._upload()

    def _upload(self) -> None:
        # A flush and the thread must not send the same file at the same time.
        with self._uploading:
            self._error = None
            # Looks at the files before reading them: if one grows meanwhile, the next copy sends it
            # again.
            paths = filter(Path.is_file, sorted(self.local.rglob("[!.]*")))
            stats = {path: path.stat() for path in paths}
            files = {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}
            changed = [path for path in files if self._sent.get(path) != files[path]]
            num_bytes = sum(files[path][0] for path in changed)
            self.pause_s = max(UPLOAD_EVERY_S, num_bytes / UPLOAD_BYTES_PER_S)
            if not changed:
                return
            try:
                # First what is stored, then the lock: if it still holds, another run has written
                # none of that.
                stored = {stat.name: stat.generation for stat in self.storage.list()}
                self._lock.confirm()
            except ShardsetError as error:
                self._error = error
                return
            for path in filter(Path.is_file, changed):
                name = path.relative_to(self.local).as_posix()
                try:
                    self._lock.keep()
                    generation = stored.get(name, ABSENT)
                    self.storage.write(name, path.read_bytes(), if_generation=generation)
                    self._sent[path] = files[path]
                except ShardsetError as error:
                    self._error = self._lock.taken(error) or error
                    # The storage retried for minutes, or is another run's: every other file would
                    # fare the same.
                    if isinstance(self._error, TransientError | RunTaken):
                        return
