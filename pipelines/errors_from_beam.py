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
_LINE = re.compile(
    r"(?:^|\n|\\n|: )(?:[\w.]*\.)?(" + "|".join(sorted(_NAMES)) + r"): (.*?)(?: \[while running |\\n|\n|$)"
)


@contextmanager
def translated() -> Iterator[None]:
    """Raises the ShardsetError that a runner's error is about, if there is one."""
    try:
        yield
    except RuntimeError as error:
        ours = find(str(error))
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
