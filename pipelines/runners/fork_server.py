"""The process that worker processes are forked from: it imports Beam once, while the launching
process does so too.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver

CONTEXT = multiprocessing.get_context("forkserver")

_RETURN_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(2**18),
    "MALLOC_TRIM_THRESHOLD_": str(2**18),
}
"""Settings for glibc's malloc, which otherwise keeps a fifth of a worker's peak; the user's own
settings win.
"""


def may_be_needed(beam_flags: Sequence[str]) -> bool:
    """Whether a build with these flags of Beam may start workers on this machine."""
    others = ("--runner", "--direct_running_mode=in_memory", "--direct_num_workers=1")
    return len(os.sched_getaffinity(0)) > 1 and not any(
        flag.startswith(others) for flag in beam_flags
    )


def begin() -> None:
    """Starts the process unless it runs; it ends with this one."""
    environment = dict(os.environ)
    # PYTHONSAFEPATH: ignores a random.py in this folder.
    os.environ |= (
        _RETURN_FREED_MEMORY
        | environment
        | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONSAFEPATH": "1",
        }
    )
    try:
        CONTEXT.set_forkserver_preload(["pipelines.runners.preloaded"])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= environment
