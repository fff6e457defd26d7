"""Our own errors, found again in what a runner makes of them.

A runner reports the failure of a worker as the text of a traceback. The last error of our tree in that text is what
the user needs to read; anything else stays what it is.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from shardset import errors

_NAMES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.ShardsetError)
}
_LOST = re.compile(
    r"(?:Pipeline \S+ failed in state |Dataflow pipeline failed\. State: )(\w+)(?:: |, Error:)(.*)", flags=re.DOTALL
)
_HUNG_UP = re.compile(r"<_\w+ of RPC that terminated with:.*?details = \"(.*?)\"", flags=re.DOTALL)
_STEP = re.compile(r" \[while running '[^']*'\]$")
"""What Beam adds to an error that is raised in this process."""

_LINE = re.compile(
    r"(?:^|\n|\\n|: )(?:[\w.]*\.)?(" + "|".join(sorted(_NAMES)) + r"): (.*?)(?: \[while running |\\n|\n|$)"
)


@contextmanager
def translated(failures: tuple[type[Exception], ...] = (RuntimeError,)) -> Iterator[None]:
    """Raises the ShardsetError that a runner's error is about, if there is one, or says that a service lost the job.

    `failures` are what the runner raises.
    """
    try:
        yield
    except errors.ShardsetError as error:
        error.args = tuple(_STEP.sub("", str(part)) for part in error.args)
        raise
    except failures as error:
        ours = find(str(error)) or _lost_job(str(error)) or _lost_server(str(error))
        if ours is None and isinstance(error, RuntimeError):
            raise
        ours = ours or _refused(error)
        raise ours from error


def find(text: str) -> errors.ShardsetError | None:
    """The last of our errors that a runner's text names, or None."""
    found = _LINE.findall(text)
    if not found:
        return None
    name, sentence = found[-1]
    return _NAMES[name](sentence)


def _lost_job(text: str) -> errors.ShardsetError | None:
    lost = _LOST.match(text)
    if lost is None:
        return None
    return errors.ShardsetError(
        f"the job ended as {lost[1]} ({_gist(lost[2])}); "
        "the runner's log has the whole of it; the same command goes on from here"
    )


def _lost_server(text: str) -> errors.ShardsetError | None:
    lost = _HUNG_UP.match(text)
    if lost is None:
        return None
    return errors.ShardsetError(
        f"the job server is gone ({lost[1]}); start it again, its own log may say why; "
        "the same command goes on from here"
    )


def _refused(error: Exception) -> errors.ShardsetError:
    return errors.ShardsetError(
        f"the service did not take the job ({_gist(str(error))}); "
        "docs/dataflow.md lists the permissions; the same command goes on from here"
    )


def _gist(text: str) -> str:
    """The line of a message that says most: the last of a traceback, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines in ([], ["None"]):
        return "no reason given"
    return lines[-1 if lines[0].startswith("Traceback") else 0][:500]
