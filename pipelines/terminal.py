"""Consoles that show raw names as they are,
and the output of worker processes only where it helps.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from shardset.errors import ShardsetError, printable

_NO_LIMIT = 100_000


def plain(text: str, style: str = "") -> Text:
    """The text, shown as it is even if a raw name holds rich's markup or terminal control
    characters.
    """
    return Text(printable(text), style)


def on_standard_output() -> Console:
    """A console on standard output; it does not wrap lines for a file or another program."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _NO_LIMIT
    return console


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
