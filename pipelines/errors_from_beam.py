"""Our own errors, found again in what a runner makes of them.

A runner reports the failure of a worker as the text of a traceback. The last error of our tree in that text is what
the user needs to read; anything else stays what it is.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pipelines import encoding
from shardset import errors

_NAMES = {
    name: kind
    for module in (errors, encoding)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, errors.ShardsetError)
}
_LOST = re.compile(r"Pipeline \S+ failed in state (\w+): (.*)")
_LINE = re.compile(
    r"(?:^|\n|\\n|: )(?:[\w.]*\.)?(" + "|".join(sorted(_NAMES)) + r"): (.*?)(?: \[while running |\\n|\n|$)"
)


@contextmanager
def translated() -> Iterator[None]:
    """Raises the ShardsetError that a runner's error is about, if there is one, or says that a cluster lost the job."""
    try:
        yield
    except RuntimeError as error:
        ours = find(str(error)) or _lost_job(str(error))
        if ours is None:
            raise
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
        f"the job ended as {lost[1]} ({lost[2].strip()[:500]}); "
        "the runner's log has the whole of it; the same command goes on from here"
    )
