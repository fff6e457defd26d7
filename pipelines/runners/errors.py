"""Turns a runner's error back into the ShardsetError that caused it.

A runner reports the failure of a worker as the text of a traceback. The last ShardsetError in that
text is the message for the user. Any other error is raised unchanged.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from shardset import errors

T = TypeVar("T")

_FAILED_JOB = re.compile(
    r"(?:Pipeline \S+ failed in state |Dataflow pipeline failed\. State: )(\w+)(?:: |, Error:)(.*)",
    flags=re.DOTALL,
)
_CLOSED_RPC = re.compile(
    r"<_\w+ of RPC that terminated with:.*?details = \"(.*?)\"", flags=re.DOTALL
)
_STEP_NAME = re.compile(r" \[while running '[^']*'\]$")
"""Beam adds this to an error that is raised in this process."""

_ERROR_LINE = r"(?:^|\n|\\n|: )(?:[\w.]*\.)?(%s): (.*?)(?: \[while running |\\n|\n|$)"
"""An error of a worker in the text of a runner: its class, one of some, and its message."""


@contextmanager
def translated(failures: tuple[type[Exception], ...] = (RuntimeError,)) -> Iterator[None]:
    """Raises the ShardsetError behind a runner's error, or one that describes the failure of a job
    or of its service.

    `failures` are the errors that the runner raises.
    """
    try:
        yield
    except errors.ShardsetError as error:
        error.args = tuple(_STEP_NAME.sub("", str(part)) for part in error.args)
        raise
    except failures as error:
        ours = _cause(error)
        if ours is None:
            raise
        raise ours from error


def _cause(error: Exception) -> errors.ShardsetError | None:
    """The last ShardsetError in a runner's text, or the failure of the job or its service; None if
    there is neither.
    """
    # each is made of a message
    text, kinds = str(error), {kind.__name__: kind for kind in kinds_of(errors.ShardsetError)}
    if matches := re.findall(_ERROR_LINE % "|".join(sorted(kinds)), text):
        name, sentence = matches[-1]
        return kinds[name](sentence)
    if match := _FAILED_JOB.match(text):
        sentence = (
            f"the job ended as {match[1]} ({_gist(match[2])}); the runner's log has the details"
        )
    elif match := _CLOSED_RPC.match(text):
        sentence = f"the job server is gone ({match[1]}); start it again, its own log may say why"
    elif isinstance(error, RuntimeError):
        return None
    else:
        sentence = (
            f"the service did not take the job ({_gist(text)});"
            f" {errors.DOCS}/how-to/clusters.md lists the permissions"
        )
    return errors.ShardsetError(f"{sentence}; run the same command again to resume")


def kinds_of(base: type[T]) -> Iterator[type[T]]:
    """A class and all below it, wherever they are defined."""
    yield base
    for below in base.__subclasses__():
        yield from kinds_of(below)


def _gist(text: str) -> str:
    """The most informative line of a message: the last one of a traceback, otherwise the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines in ([], ["None"]):
        return "no reason given"
    return lines[-1 if lines[0].startswith("Traceback") else 0][:500]
