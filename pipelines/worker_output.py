"""A console that shows the output of worker processes only where it helps."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from shardset.errors import ShardsetError


def say_beam(console: Console | None) -> None:
    """Says what takes the next seconds, unless nobody waits."""
    if console and console.is_terminal:
        console.print("starting Apache Beam")


@contextmanager
def quiet_workers(*, show: bool) -> Iterator[Console]:
    """A console on the real standard error; whatever else prints there goes to a file until the
    block ends.

    Beam prints a failing worker's traceback several times. The file is shown only if the block ends
    with an unexpected error; with `show`, nothing is redirected.
    """
    if show:
        yield Console(stderr=True)
        return
    sys.stderr.flush()
    # Worker processes inherit file descriptor 2; replacing `sys.stderr` would not reach them.
    real = os.dup(2)
    with (
        tempfile.TemporaryFile() as log,
        os.fdopen(real, "w", buffering=1, closefd=True) as terminal,
    ):
        os.dup2(log.fileno(), 2)
        try:
            yield Console(file=terminal)
        except (ShardsetError, KeyboardInterrupt):
            raise
        except BaseException:
            log.seek(0)
            terminal.write(log.read().decode("utf-8", "replace"))
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal.fileno(), 2)
