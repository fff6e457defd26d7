"""Shared by both programs: exit codes, `--debug`, closed pipes, missing libraries, the top-level parser."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from shardset.addresses import masked
from shardset.errors import ConfigError, ShardsetError, missing_library
from shardset.version import __version__

OK, FAILED, USAGE, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 130


class Parser(argparse.ArgumentParser):
    """An argument parser that masks passwords in its error messages."""

    def error(self, message: str) -> NoReturn:
        """Exits with the usage and the message."""
        super().error(masked(message))


def program_parser(command: str, module: str, **options: Any) -> Parser:
    """The top-level parser of a program, with `--version` and `--print-completion`; named as the shell called it."""
    called = Path(sys.argv[0]).name
    parser = Parser(prog=called if called == command else f"python -m {module}", allow_abbrev=False, **options)
    parser.add_argument("--version", action="version", version=f"shardset {__version__}")
    parser.add_argument("--print-completion", action=_PrintCompletion, choices=["bash", "zsh", "tcsh"],
                        help=f"for {command}: a completion script, to be evaluated")  # fmt: skip
    return parser


class _PrintCompletion(argparse.Action):
    """Prints the script and ends the program."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        import shtab  # comes with an extra; `--help` works without one

        print(shtab.complete(parser, values))
        parser.exit(OK)


def run_program(main: Callable[[], int], extra: str) -> NoReturn:
    """Runs `main` as a shell command and exits with its code.

    A closed pipe (`| head`) ends it silently, a missing library with one sentence that names the extra to install.
    """
    debug = "--debug" in sys.argv
    quiet_warnings(show=debug)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack letters of a name
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


def run_verb(verb: Callable[[], int | None], *, debug: bool, stopped: str = "stopped") -> int:
    """The exit code of a verb. Prints an error as one sentence on standard error, with `debug` as a traceback.

    After Ctrl-C, prints `stopped` and the arguments of the KeyboardInterrupt.
    """
    try:
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
        print(stopped + "".join(map(str, interrupt.args)), file=sys.stderr)
        return INTERRUPTED
    return code


def printable(text: str) -> str:
    """The text with control characters escaped, so that no name in the raw input can control a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def quiet_warnings(*, show: bool) -> None:
    """Hides warnings in this process and its children: they point into libraries, which helps no user.

    Does nothing with `show`, or if Python itself was told what to do (`-W`, PYTHONWARNINGS).
    """
    if show or sys.warnoptions:
        return
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
