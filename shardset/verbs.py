"""The verbs of both programs, by what they are for; `shardset VERB` finds them here.

The library imports neither program: a verb's is imported by name, once it is called.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from shardset.errors import masked
from shardset.program import (
    EXIT_CODES,
    OK,
    USAGE,
    Parser,
    did_you_mean,
    run_program,
    run_verb,
)
from shardset.version import __version__

GROUPS: dict[str, dict[str, str]] = {
    "make": {
        "build": "turn raw files into a shard set",
        "append": "add raw files to a shard set",
        "adopt": "make a shard set of tars that others made, where they are",
        "column": "give each sample of a set one more value",
    },
    "look": {
        "inspect": "show what is in a shard set",
        "report": "make one HTML page about a shard set or a run",
        "verify": "compare a shard set with its manifest",
        "estimate": "how a shard set divides and is read: steps, memory, bytes",
    },
    "choose": {
        "view": "choose samples of a shard set",
    },
    "change": {
        "tag": "name a version of a shard set",
        "log": "list the versions of a shard set",
        "diff": "compare two versions of a shard set",
        "compact": "forget samples of a shard set",
        "repair": "write damaged or missing shards of a shard set again",
    },
    "train": {
        "train": "train a model on a shard set, or resume the run in the run folder",
        "evaluate": "print the accuracy of a run's best checkpoint, or of --resume URL",
        "predict": "print the most probable classes of images",
        "export": "write the side files of other readers, or the model of a run",
    },
    "operate": {
        "doctor": "check whether this machine is ready for a run",
        "bench-input": "read and decode as training does, without a model, and print the rate",
        "explain": "print the samples of a step, the steps of a sample, or the worst samples",
        "merge-logs": "print the logs of all hosts by time",
        "job": "print a JobSet that trains on GKE, on TPUs or GPUs; nothing is applied",
        "tpu": "create, use and delete TPUs by the Cloud TPU API",
    },
}
"""For each verb the line that help shows."""

OF_BOTH = ("export", "report")
"""Their argument, a set or a run, decides which program runs them."""

RUN = "config.json"
"""The file of a run folder by which it is known as one."""

HELP = {name: text for verbs in GROUPS.values() for name, text in verbs.items()}

EXAMPLES = """\
examples:
  shardset build --source folder --input photos --holdout test=0.1 --output shards
  shardset report shards
  shardset train --manifest shards --run-dir run
"""


def add_verb(
    verbs: Any, name: str, description: str = "", examples: str = "", **defaults: Any
) -> Parser:
    """Adds the parser of a verb to its program's."""
    verb: Parser = verbs.add_parser(
        name,
        help=HELP[name],
        description=description or HELP[name],
        epilog=f"{examples}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_argument(
        "--debug", action="store_true", help="show tracebacks, logs and warnings of libraries"
    )
    verb.set_defaults(**defaults)
    return verb


def help_text() -> str:
    """What `shardset --help` prints."""
    text = (
        "usage: shardset VERB ...\n\nRaw images to exact WebDataset shards, and training on them.\n"
    )
    for group, verbs in GROUPS.items():
        text += f"\n{group}:\n" + "".join(f"  {name:13}{line}\n" for name, line in verbs.items())
    return f"{text}\n{EXAMPLES}\n`shardset VERB --help` says what a verb takes.\n"


def program_of(verb: str, arguments: list[str]) -> str:
    """The program that has the verb; of both, `trainer` if an argument names a run folder."""
    if verb in OF_BOTH:
        return "trainer" if any(map(_is_run, arguments)) else "pipelines"
    return "trainer" if verb in GROUPS["train"] | GROUPS["operate"] else "pipelines"


def _is_run(argument: str) -> bool:
    """Whether a folder of that name holds a run."""
    # late: `--help` needs no storage
    from shardset.storage.base import stat_or_none
    from shardset.storage.open import is_address, open_storage

    if argument.startswith("-") or not (is_address(argument) or Path(argument).is_dir()):
        return False
    return stat_or_none(open_storage(argument), RUN) is not None


def main() -> int:
    """Prints help, or hands over to the program that has the verb. Returns the exit code."""
    verb, *arguments = sys.argv[1:] or ["--help"]
    if verb in ("--help", "-h"):
        print(help_text(), end="")
        return OK
    if verb == "--version":
        print(f"shardset {__version__}")
        return OK
    if verb not in HELP:
        near = did_you_mean(verb, HELP)
        print(f"shardset: no verb {masked(verb)!r}{near}; see `shardset --help`", file=sys.stderr)
        return USAGE
    import_module(f"{program_of(verb, arguments)}.__main__").program()
    return OK


def program() -> NoReturn:
    """The program `shardset` of a shell."""
    run_program(lambda: run_verb(main, debug="--debug" in sys.argv), "pipelines")
