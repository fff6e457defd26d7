"""Turns a runner's error back into the ShardsetError that caused it.

A runner reports the failure of a worker as the text of a traceback. The last of our errors in that text is what the
user needs to read. Any other error stays as it is.
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
_FAILED_JOB = re.compile(
    r"(?:Pipeline \S+ failed in state |Dataflow pipeline failed\. State: )(\w+)(?:: |, Error:)(.*)", flags=re.DOTALL
)
_CLOSED_RPC = re.compile(r"<_\w+ of RPC that terminated with:.*?details = \"(.*?)\"", flags=re.DOTALL)
_STEP_NAME = re.compile(r" \[while running '[^']*'\]$")
"""Added by Beam to an error that is raised in this process."""

_ERROR_LINE = re.compile(
    r"(?:^|\n|\\n|: )(?:[\w.]*\.)?(" + "|".join(sorted(_NAMES)) + r"): (.*?)(?: \[while running |\\n|\n|$)"
)


@contextmanager
def translated(failures: tuple[type[Exception], ...] = (RuntimeError,)) -> Iterator[None]:
    """Raises the ShardsetError behind a runner's error, or one that says that a service lost or refused the job.

    `failures` are the errors that the runner raises.
    """
    try:
        yield
    except errors.ShardsetError as error:
        error.args = tuple(_STEP_NAME.sub("", str(part)) for part in error.args)
        raise
    except failures as error:
        ours = find(str(error)) or _lost_job(str(error)) or _lost_server(str(error))
        if ours is None and isinstance(error, RuntimeError):
            raise
        ours = ours or _refused(error)
        raise ours from error


def find(text: str) -> errors.ShardsetError | None:
    """The last of our errors in a runner's text, or None."""
    matches = _ERROR_LINE.findall(text)
    if not matches:
        return None
    name, sentence = matches[-1]
    return _NAMES[name](sentence)


def _lost_job(text: str) -> errors.ShardsetError | None:
    match = _FAILED_JOB.match(text)
    if match is None:
        return None
    return errors.ShardsetError(
        f"the job ended as {match[1]} ({_gist(match[2])}); "
        "the runner's log has the whole of it; the same command goes on from here"
    )


def _lost_server(text: str) -> errors.ShardsetError | None:
    match = _CLOSED_RPC.match(text)
    if match is None:
        return None
    return errors.ShardsetError(
        f"the job server is gone ({match[1]}); start it again, its own log may say why; "
        "the same command goes on from here"
    )


def _refused(error: Exception) -> errors.ShardsetError:
    return errors.ShardsetError(
        f"the service did not take the job ({_gist(str(error))}); "
        "docs/dataflow.md lists the permissions; the same command goes on from here"
    )


def _gist(text: str) -> str:
    """The most telling line of a message: the last one of a traceback, otherwise the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines in ([], ["None"]):
        return "no reason given"
    return lines[-1 if lines[0].startswith("Traceback") else 0][:500]
