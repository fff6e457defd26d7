"""The parsers of the command line: flags, their defaults and their help."""

import argparse
import textwrap

from pipelines.config import (
    INPUT_OPTIONS,
    SIZES,
    SOURCES,
    AdoptConfig,
    BareNumbers,
    BuildConfig,
    ColumnConfig,
)
from pipelines.estimate.reading import Reading
from pipelines.images.options import ImageOptions
from pipelines.sets.view_maker import Choice
from shardset.errors import DOCS
from shardset.program import Parser, program_parser
from shardset.settings import add_flags
from shardset.verbs import add_verb

SIZES_TITLE = "sizes"

_SOURCES = "\n".join(
    textwrap.fill(
        text, 98, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14, break_on_hyphens=False
    )
    for name, text in SOURCES.items()
)

BUILD_EPILOG = f"""\
sources, and what --input is for each:
{_SOURCES}

examples:
  shardset build --source folder --input photos --holdout test=0.1 --output shards
  shardset build --source listing --input birds.csv --label-column species \\
      --output shards
  shardset build --source hf --input downloaded/food101 --output shards
  shardset build --source imagenet --input /data/ilsvrc --output gs://bucket/imagenet \\
      --samples-per-shard train=1252,validation=1000 --remainder pad
  shardset build --source cifar10 --input cifar-10-python.tar.gz --output shards \\
      --target-samples train=1280000 --samples-per-shard train=2000

Flags of Apache Beam (--runner, --project, --region, --temp_location, --direct_num_workers, ...)
pass through; without --runner the build runs here, on all cores. --any-runner allows runners that
no test builds on. To resume a build that was stopped, give the same command again.
"""

ESTIMATE_EPILOG = f"""\
examples:
  shardset estimate gs://bucket/imagenet --global-batch-size 4096 --num-replicas 32 \\
      --num-hosts 4
  shardset estimate --samples train=1281167,validation=50000 --mean-bytes 110000 \\
      --classes 1000 --num-shards train=640,validation=50 --global-batch-size 4096 \\
      --num-replicas 32 --num-hosts 4

Sizes, order, steps and memory come from the code that builds and trains; {DOCS}/how-to/check.md
explains every number. Numbers that a run would refuse are printed as `refused`, and the exit code
is 2.
For raw files, `build --dry-run --verify none` prints how they would divide, from names and sizes
where those tell it.
"""


DESCRIPTIONS = {
    "build": "Plans, writes, then commits: the manifest appears last, or not at all.",
    "append": "Writes raw files as further shards and publishes the next version of the set.",
    "adopt": "Reads each tar once, and writes an index next to it and a manifest; copies nothing.",
    "column": "Writes columns/NAME/ below the set: tars with its keys, for Stream(columns=...).",
    "inspect": "Shows splits, shards and classes; finds a sample by its key or its original name.",
    "report": "Makes a page: totals, classes, sizes, pictures, duplicates, bad input, provenance.",
    "verify": "Compares sizes and checksums of every file; with --deep every sample too.",
    "estimate": "Samples, shards, steps, mixing, memory and bytes, from a manifest or numbers.",
    "view": "Writes chosen samples down as a view, which is read like a set; copies no sample.",
    "tag": "Names the newest version, or SET@N, for addresses such as gs://bucket/set@NAME.",
    "log": "Lists the versions of a set, the newest first.",
    "diff": "Compares keys, classes and images of two sets or versions (gs://bucket/set@3).",
    "compact": "Writes the next version without some samples, and removes the old files later.",
    "repair": "Writes missing or damaged files of any version again, from the raw input.",
    "export": "Writes the side files of other readers from manifest and indexes; never a tar.",
}
"""What the help of each verb says first."""


def parser() -> Parser:
    """The parser of the program.

    Its result holds the chosen verb in `verb` and that verb's parser in `verb_parser`.
    """
    top = program_parser(
        "pipelines",
        description="Turns raw image files into exact, reproducible WebDataset shards.",
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, examples: str = "") -> Parser:
        added = add_verb(verbs, name, DESCRIPTIONS[name], examples)
        added.add_argument(
            "--json", action="store_true", help="print the result as JSON on standard output"
        )
        return added

    add_build(verb("build", BUILD_EPILOG))
    add_append(verb("append"))
    tag = _add_set(verb("tag"))
    tag.add_argument("name", metavar="NAME", help="letters, digits, ., _ and -; not only digits")
    _add_set(verb("log"))
    diff = verb("diff")
    diff.add_argument("old", metavar="OLD", help="a set, or SET@VERSION")
    diff.add_argument("new", metavar="NEW", help="a set, or SET@VERSION")
    compact = _add_set(verb("compact"))
    compact.add_argument(
        "--drop-keys", required=True, metavar="FILE", help="a text file with a key in each line"
    )
    compact.add_argument(
        "--grace",
        type=int,
        default=24,
        metavar="HOURS",
        help="keep old files so long, for readers of older versions; then give the same command "
        "again (default 24)",
    )
    compact.add_argument(
        "--side-files",
        action="store_true",
        help="also remove columns and side files of other readers with removed tars",
    )
    add_flags(verb("adopt"), AdoptConfig)
    repair = _add_set(verb("repair"))
    repair.add_argument("--input", metavar="URL", help="where the raw input is now, if it moved")
    column = _add_set(verb("column"))
    column.add_argument(
        "name", metavar="NAME", help="the name of the column: up to 12 of a-z, 0-9, _ and -"
    )
    add_flags(column, ColumnConfig)
    verify = _add_set(verb("verify"))
    verify.add_argument(
        "--deep",
        action="store_true",
        help="also decode every image and compare every label and key",
    )
    _add_inspect(verb("inspect"))
    export = _add_set(verb("export"))
    export.add_argument(
        "--to",
        required=True,
        action="extend",
        type=lambda text: text.split(","),
        metavar="READER,...",
        help="any of wids, hf, rfdetr, openclip",
    )
    export.add_argument(
        "--output",
        metavar="FOLDER",
        help="where to write, if the format allows (default: beside the tars)",
    )
    export.add_argument(
        "--overwrite", action="store_true", help="replace existing files that differ"
    )
    _add_estimate(verb("estimate", ESTIMATE_EPILOG))
    report = _add_set(verb("report"))
    report.add_argument("--output", metavar="FILE", help="default: report.html beside the manifest")
    report.add_argument(
        "--images",
        type=int,
        default=100_000,
        metavar="N",
        help="decode at most N images for sizes and near-duplicates (default 100000)",
    )
    view = verb("view")
    view.add_argument("output", metavar="OUT", help="the view, a .parquet file")
    view.add_argument(
        "--of", required=True, metavar="SET", help="the set, or a view to choose from"
    )
    add_flags(view.add_argument_group("choices, applied in this order"), Choice)
    return top


def add_build(build: Parser) -> None:
    """Adds the flags of a build."""
    where = build.add_argument_group("what and where")
    add_flags(where, BuildConfig, ("output",))
    _add_input(build, where)
    add_flags(where, BuildConfig, ("overwrite",))
    _add_how(where)
    image = build.add_argument_group("images (default: stored byte for byte)")
    add_flags(image, ImageOptions)


def _add_how(where: argparse._ArgumentGroup) -> None:
    how = where.add_mutually_exclusive_group()
    how.add_argument(
        "--dry-run", action="store_true", help="read all input, print the exact plan, write nothing"
    )
    text = "end once Dataflow has the job, which publishes the set by itself; makes no report.html"
    how.add_argument("--no-wait", dest="wait", action="store_false", help=text)
    where.add_argument("--report", action=argparse.BooleanOptionalAction, default=True,
                       help="write report.html, a page about the set")  # fmt: skip


def _add_set(verb: Parser, dest: str = "set") -> Parser:
    verb.add_argument(dest, metavar="SET", help="the set: its folder or manifest, local or remote")
    return verb


def add_append(append: Parser) -> None:
    """Adds the flags of an append."""
    _add_set(append, "output")
    where = append.add_argument_group("what")
    _add_input(append, where)
    add_flags(where, BuildConfig, ("append",))
    where.add_argument(
        "--overwrite", action="store_true", help="start over an append that was stopped"
    )
    _add_how(where)


def _add_input(build: Parser, where: argparse._ArgumentGroup) -> None:
    """The flags of whatever turns raw files into shards."""
    add_flags(where, BuildConfig, ("source", "input", "holdout", *INPUT_OPTIONS, "only_shards"))
    add_flags(build.add_argument_group(SIZES_TITLE), BuildConfig, (*SIZES, "seed"))
    bad = build.add_argument_group("bad input")
    add_flags(bad, BuildConfig, ("verify", "require", "max_bad_fraction"))


def _add_inspect(inspect: Parser) -> None:
    _add_set(inspect)
    inspect.add_argument("--split", help="only this split")
    which = inspect.add_mutually_exclusive_group()
    which.add_argument("--shard", type=int, metavar="N", help="the samples of one shard")
    which.add_argument(
        "--key", help="where the sample with this key is stored, and its original name"
    )
    which.add_argument("--name", help="the samples made from the input with this original name")
    inspect.add_argument(
        "--class", dest="class_name", metavar="CLASS", help="a class by label, name or wnid"
    )


def _add_estimate(estimate: Parser) -> None:
    raw = estimate.add_argument_group("one of: an existing set, or bare numbers")
    either = raw.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "set",
        metavar="MANIFEST",
        nargs="?",
        help="the manifest of an existing set, or its folder",
    )
    add_flags(either, BareNumbers, ("samples",))
    add_flags(raw, BareNumbers, ("mean_bytes", "classes"))
    add_flags(estimate.add_argument_group(SIZES_TITLE), BuildConfig, SIZES)
    how = estimate.add_argument_group("how it is read")
    how.add_argument("--split", help="default: train, or the first by name")
    add_flags(how, Reading)
