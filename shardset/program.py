"""Shared by both programs: exit codes, `--debug`, closed pipes, missing libraries, the top-level
parser.
"""

import argparse
import difflib
import io
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from shardset.errors import ConfigError, ShardsetError, masked, missing_library, printable
from shardset.storage.retry import while_someone_waits
from shardset.version import __version__

OK, FAILED, USAGE, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = """\
exit codes: 0 done; 1 failed, or the data is damaged; 2 wrong command line; 3 asked to stop, and
saved everything; 130 stopped by Ctrl-C. After 3 and 130 the same command continues.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that masks passwords in its error messages.

    What it parses names it, as `verb_parser`.

    Of a program with verbs, `verb_parser` is the parser of the verb that was called.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set_defaults(verb_parser=self)

    @property
    def flags(self) -> Collection[str]:
        """All flags that it takes."""
        return self._option_string_actions.keys()

    @property
    def actions(self) -> Collection[argparse.Action]:
        """All that it takes, each flag once."""
        return self._actions

    def near_miss(self, argument: str) -> str:
        """A hint at the flag that an unknown argument may have meant; empty if none is near."""
        flag = argument.partition("=")[0]
        if flag in self.flags:
            return f"; write it after the verb: {self.prog} {flag} ..."
        return did_you_mean(flag, self.flags)

    def error(self, message: str) -> NoReturn:
        """Exits with the message, and where the usage is."""
        self.exit(USAGE, f"{self.prog}: {masked(message)}; see `{self.prog} --help`\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuses a value that is none of the choices, with a hint at the nearest."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action,
                f"no choice {value!r}{did_you_mean(value, [*action.choices])}; there are"
                f" {', '.join(action.choices)}",
            )


def program_parser(module: str, **options: Any) -> Parser:
    """The top-level parser of a program, with `--version`; named as the shell called it."""
    is_module = Path(sys.argv[0]).parts[-2:] == (module, "__main__.py")
    parser = Parser(
        prog=f"python -m {module}" if is_module else "shardset",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        **options,
    )
    parser.add_argument("--version", action="version", version=f"shardset {__version__}")
    return parser


def did_you_mean(name: str, names: Collection[str]) -> str:
    """A hint at the nearest name; empty if none is near."""
    near = nearest(name, names)
    return f", did you mean {near!r}?" if near else ""


def nearest(name: str, names: Collection[str]) -> str | None:
    """The nearest name, else the one whose last part or beginning is nearest; None if none is
    near.
    """
    for part in (str, lambda other: other.rpartition(".")[2], lambda other: other[: len(name)]):
        parts = {part(other): other for other in names}
        if near := difflib.get_close_matches(name, parts, n=1):
            return parts[near[0]]
    return None


def run_program(main: Callable[[], int], extra: str) -> NoReturn:
    """Runs `main` as a shell command and exits with its code.

    A closed pipe (`| head`) ends it silently, a missing library with one sentence that names the
    extra to install.
    """
    debug = "--debug" in sys.argv
    quiet_warnings(show=debug)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # the terminal's encoding may lack letters of a name
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    except ModuleNotFoundError as error:
        if debug:
            raise
        sys.exit(f"{type(error).__name__}: {missing_library(error, extra)}")
    sys.exit(code)


def run_verb(
    verb: Callable[[], int | None],
    *,
    debug: bool,
    is_interactive: bool = False,
) -> int:
    """The exit code of a verb.

    Prints an error as one sentence on standard error, with `debug` as a traceback.

    One that is interactive gives up on a storage after half a minute.
    """
    try:
        with while_someone_waits() if is_interactive else nullcontext():
            code = verb() or OK
        if sys.stdout:
            sys.stdout.flush()  # a closed pipe raises here, not during Python's exit
    except BrokenPipeError:
        raise  # run_program handles it
    except (ShardsetError, OSError) as error:
        if debug:
            raise
        print(printable(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt as interrupt:
        what = "".join(map(str, interrupt.args)) or "; the same command continues"
        print(f"stopped{what}", file=sys.stderr)
        return INTERRUPTED
    return code


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 shard`, `2 shards`.

    `plural` is for plurals without a plain s (`classes`).
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def some_of(texts: Sequence[str], most: int) -> str:
    """The first texts in one, with dots if there are more."""
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


def quiet_warnings(*, show: bool) -> None:
    """Hides warnings in this process and its children: they point into libraries, which helps no
    user.

    Does nothing with `show`, or if Python itself was told what to do (`-W`, PYTHONWARNINGS).
    """
    if show or sys.warnoptions:
        return
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
