"""`python -m trainer VERB`: handles signals, then imports the rest, which takes seconds."""

import sys
from typing import NoReturn

from trainer.runtime import preemption


def program() -> NoReturn:
    """The program of a shell."""
    if sys.argv[1:2] == ["train"]:
        preemption.listen()
    try:
        from trainer import cli
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    cli.program()


if __name__ == "__main__":
    program()
