"""The compile cache of torch_xla: compiled graphs as files in a local folder.

A run does not depend on it. Where it can't be used, the run logs a warning and compiles.
"""

import os
import sys
import tempfile
from pathlib import Path

from shardset.storage.open import local_folder

VARIABLE = "XLA_PERSISTENT_CACHE_PATH"
"""Environment variable that names the folder to torch_xla, which reads it once, when it first compiles."""


def use(folder: str | None, process: int) -> None:
    """Lets torch_xla keep compiled graphs in a folder, by default in the cache folder of the user.

    Each process has a folder of its own in it, because torch_xla does not write files atomically. Raises ConfigError
    for an address.
    """
    # Not torch_xla's `initialize_cache`, which sets this too, but refuses the second replica of a process.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parent = Path(home, "shardset", "xla") if folder is None else local_folder(folder, "--compile-cache")
    own = parent / f"process-{process:03d}"
    try:
        own.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=own).close()
    except OSError as error:
        print(f"warning: compile cache: {error}; the run continues without it", file=sys.stderr, flush=True)
        return
    os.environ[VARIABLE] = str(own.absolute())
