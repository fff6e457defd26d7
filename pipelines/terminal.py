"""What a terminal shows: names as they are, and what the runner's processes print only where it is needed."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from shardset.errors import ShardsetError
from shardset.program import printable

_NO_LIMIT = 100_000


def plain(text: str, style: str = "") -> Text:
    """The text as it is: neither rich's markup nor a terminal's control characters act in names of the raw input."""
    return Text(printable(text), style)


def on_standard_output() -> Console:
    """A console on standard output. Lines to a file or another program are as long as they have to be."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _NO_LIMIT
    return console


@contextmanager
def quiet_workers(*, show: bool) -> Iterator[Console]:
    """A console on the real standard error, while what processes print there goes to a file.

    Beam prints a failing worker's traceback there, several times over. It is shown if the block ends by an error
    that is not ours, and not kept apart at all with `show`.
    """
    if show:
        yield Console(stderr=True)
        return
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as log, os.fdopen(real, "w", buffering=1, closefd=True) as terminal:
        os.dup2(log.fileno(), 2)
        try:
            yield Console(file=terminal)
        except ShardsetError:
            raise
        except BaseException:
            log.seek(0)
            terminal.write(log.read().decode("utf-8", "replace"))
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal.fileno(), 2)
