"""The parsers of the command line: flags, their defaults and their help."""

import argparse
from typing import TypeAlias

from pipelines import arguments
from pipelines.arguments import Merge
from pipelines.config import INPUT_FLAGS, SIZES, BuildConfig
from pipelines.images.options import IMAGE_FLAGS, ImageOptions
from shardset.order.budget import BUDGET_BYTES
from shardset.program import Parser, program_parser
from shardset.settings import add_flags

COMMAND = "shardset-pipelines"
"""The installed name of this program: a shell completes commands by name, so not `python -m pipelines`."""

EXIT_CODES = "exit codes: 0 done; 1 failed, or the data is damaged; 2 wrong command line; 130 stopped by Ctrl-C"

BUILD_EPILOG = f"""\
sources, and what --input is for each:
  cifar10, cifar100   the published .tar.gz (python or binary version), or the folder with it or its extracted files
  imagenet            a folder with ILSVRC2012_img_train.tar, _img_val.tar and _devkit_t12.tar.gz; the Kaggle tree;
                      or class folders train/WNID/, validation/WNID/
  folder              SPLIT/CLASS/file, or CLASS/file with --holdout test=0.1; an image in any folder below CLASS is
                      of that class, unless --class-depth 2 makes classes of CLASS/SUBCLASS
  hf                  the Parquet files of a Hugging Face image dataset: their folder, or one file
  listing             a CSV, TSV, JSONL or Parquet file with the columns path, label (or image, file, filename, ...,
                      class, category, ...; else --path-column, --label-column) and optionally split, key, others
  webdataset          a folder of tars, one tar, or a pattern such as 'gs://bucket/train-{{000000..000099}}.tar'

examples:
  python -m pipelines build --source folder --input photos --holdout test=0.1 --output shards
  python -m pipelines build --source listing --input birds.csv --label-column species --output shards
  python -m pipelines build --source hf --input downloaded/food101 --output shards
  python -m pipelines build --source imagenet --input /data/ilsvrc --output gs://bucket/imagenet \\
      --samples-per-shard train=1252,validation=1000 --remainder pad
  python -m pipelines build --source cifar10 --input cifar-10-python.tar.gz --output shards \\
      --target-samples train=1280000 --samples-per-shard train=2000

Flags of Apache Beam (--runner, --project, --region, --temp_location, --direct_num_workers, ...) pass through;
without --runner the build runs here, on all cores. To resume a build that was stopped, give the same command again.

{EXIT_CODES}
"""

ESTIMATE_EPILOG = f"""\
examples:
  python -m pipelines estimate gs://bucket/imagenet --global-batch-size 4096 --world 32 --hosts 4
  python -m pipelines estimate --source folder --input photos --holdout test=0.1 --num-shards 8
  python -m pipelines estimate --samples train=1281167,validation=50000 --mean-bytes 110000 --classes 1000 \\
      --num-shards train=640,validation=50 --global-batch-size 4096 --world 32 --hosts 4 --workers 8

Sizes, order, steps and memory come from the code that builds and trains; docs/estimate.md explains every number.
Numbers that a run would refuse are printed as `refused`, and the exit code is 2.
Archives must be read: for them, `build --dry-run` prints the exact plan.

{EXIT_CODES}
"""

_Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


def parser() -> argparse.ArgumentParser:
    """The parser of the program. Its result holds the chosen verb in `verb` and that verb's parser in `verb_parser`."""
    top = program_parser(
        COMMAND, "pipelines", epilog=EXIT_CODES,
        description="Turns raw image files into exact, reproducible WebDataset shards.",
    )  # fmt: skip
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks, Beam's log and warnings of libraries")
    common.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add in (_add_build, _add_verify, _add_inspect, _add_export, _add_estimate, _add_report):
        add(verbs, common)
    return top


def _add_build(verbs: _Verbs, common: Parser) -> None:
    build = verbs.add_parser(
        "build", help="turn raw files into a shard set", parents=[common], epilog=BUILD_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Plans, writes, then commits: the manifest appears last, or not at all.",
    )  # fmt: skip
    where = build.add_argument_group("what and where")
    where.add_argument("--source", required=True, help="format of the raw input, see below")
    where.add_argument("--input", required=True, metavar="PATH", help="local or gs://, see below")
    where.add_argument("--output", required=True, metavar="URL", help="the folder of the shard set, local or gs://")
    add_flags(where, BuildConfig, (*INPUT_FLAGS, "within_input", "overwrite", "only_shards"))
    where.add_argument("--dry-run", action="store_true", help="read all input, print the exact plan, write nothing")
    where.add_argument("--report", action=argparse.BooleanOptionalAction, default=True,
                       help="write report.html, a page about the set")  # fmt: skip
    add_flags(_add_sizes(build), BuildConfig, ("seed",))
    check = build.add_argument_group("bad input")
    add_flags(check, BuildConfig, ("verify", "on_bad", "max_bad_fraction"))
    image = build.add_argument_group("images (default: stored byte for byte)")
    add_flags(image, ImageOptions, IMAGE_FLAGS)


def _add_sizes(verb: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    size = verb.add_argument_group("sizes (a number, or SPLIT=NUMBER,SPLIT=NUMBER)")
    add_flags(size, BuildConfig, SIZES)
    return size


def _add_verify(verbs: _Verbs, common: Parser) -> None:
    verify = verbs.add_parser(
        "verify", help="compare a shard set with its manifest", parents=[common], epilog=EXIT_CODES, allow_abbrev=False,
        description="Compares sizes and checksums of every file; with --deep every sample too.",
    )  # fmt: skip
    _add_manifest(verify)
    verify.add_argument("--deep", action="store_true", help="also decode every image and compare every label and key")


def _add_inspect(verbs: _Verbs, common: Parser) -> None:
    inspect = verbs.add_parser(
        "inspect", help="show what is in a shard set", parents=[common], epilog=EXIT_CODES, allow_abbrev=False,
        description="Shows tables of splits, shards and classes; finds a sample by its key or its original name.",
    )  # fmt: skip
    _add_manifest(inspect)
    inspect.add_argument("--split", help="only this split")
    inspect.add_argument("--shard", type=int, metavar="N", help="the samples of one shard")
    inspect.add_argument("--key", help="where the sample with this key is stored, and its original name")
    inspect.add_argument("--name", help="the samples made from the input with this original name")
    inspect.add_argument("--class", dest="class_name", metavar="CLASS", help="a class by label, name or wnid")


def _add_export(verbs: _Verbs, common: Parser) -> None:
    export = verbs.add_parser(
        "export", help="write the side files of other readers", parents=[common], epilog=EXIT_CODES,
        allow_abbrev=False,
        description="Writes the side files of other readers, from the manifest and the indexes; never a tar. "
                    "wids reads every tar once, for its MD5.",
    )  # fmt: skip
    _add_manifest(export)
    export.add_argument("--to", required=True, action="extend", type=arguments.names, metavar="READER,...",
                        help="any of wids, timm, energon, hf")  # fmt: skip
    export.add_argument("--output", metavar="FOLDER",
                        help="where to write, if the format allows (default: beside the tars)")  # fmt: skip
    export.add_argument("--overwrite", action="store_true", help="replace existing files that differ")


def _add_report(verbs: _Verbs, common: Parser) -> None:
    report = verbs.add_parser(
        "report", help="make one HTML page about a shard set", parents=[common], epilog=EXIT_CODES,
        allow_abbrev=False,
        description="Makes a page of totals, classes, sizes, contact sheets, duplicates, bad input and provenance.",
    )  # fmt: skip
    _add_manifest(report)
    report.add_argument("--output", metavar="FILE", help="default: report.html beside the manifest")
    report.add_argument("--force", action="store_true", help="replace any file at --output, even one that is no page")
    report.add_argument("--images", type=int, default=100_000, metavar="N",
                        help="decode at most N images for sizes and near-duplicates (default 100000)")  # fmt: skip


def _add_manifest(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("manifest", metavar="MANIFEST", help="the manifest or its folder, local or gs://")


def _add_estimate(verbs: _Verbs, common: Parser) -> None:
    estimate = verbs.add_parser(
        "estimate", help="how a shard set divides and is read: steps, memory, bytes", parents=[common],
        epilog=ESTIMATE_EPILOG, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Samples, shards, steps, mixing, memory and bytes, from a manifest, a listing or numbers.",
    )  # fmt: skip
    raw = estimate.add_argument_group("one of: an existing set, files to list, or bare numbers")
    one = raw.add_mutually_exclusive_group(required=True)
    one.add_argument("manifest", metavar="MANIFEST", nargs="?", help="the manifest of an existing set, or its folder")
    one.add_argument("--source", help="folder, listing, or imagenet as class folders")
    one.add_argument("--samples", action=Merge, type=arguments.numbers, default={}, metavar="N",
                     help="number of images, or SPLIT=N,SPLIT=N")  # fmt: skip
    raw.add_argument("--input", metavar="PATH", help="local or gs://, as for build; only names and sizes are read")
    add_flags(raw, BuildConfig, INPUT_FLAGS)
    raw.add_argument("--mean-bytes", type=float, metavar="N", help="mean bytes of an image as it will be stored")
    raw.add_argument("--classes", type=arguments.positive, metavar="N",
                     help="number of classes of --samples (default: no labels to mix)")  # fmt: skip
    _add_sizes(estimate)
    _add_reading(estimate)


def _add_reading(estimate: argparse.ArgumentParser) -> None:
    how = estimate.add_argument_group("how it is read")
    how.add_argument("--split", help="default: train, or the only one")
    how.add_argument("--global-batch-size", "--batch-size", type=arguments.positive, default=256, metavar="B",
                     help="samples of a step over all replicas (default 256)")  # fmt: skip
    how.add_argument("--world", dest="num_replicas", type=arguments.positive, default=1, metavar="N",
                     help="number of replicas (default 1)")  # fmt: skip
    how.add_argument("--hosts", dest="num_hosts", type=arguments.positive, default=1, metavar="N",
                     help="number of hosts that they run on (default 1)")  # fmt: skip
    how.add_argument("--strategy", choices=["spmd", "replica", "ddp", "single"], default="spmd",
                     help="who reads: hosts (spmd, default), replicas (replica, ddp), one (single)")  # fmt: skip
    how.add_argument("--workers", dest="num_workers", type=arguments.positive, metavar="N",
                     help="also show how shards divide over plain tar readers, N for each replica")  # fmt: skip
    how.add_argument("--num-lanes", type=arguments.positive, metavar="L", help="default: as the trainer chooses")
    how.add_argument("--block-size", type=arguments.positive, metavar="Q", help="default: as the trainer chooses")
    how.add_argument("--window", type=int, metavar="W", help="default: as the trainer chooses")
    how.add_argument("--last-batch", choices=["pad", "drop"], default="pad",
                     help="pad a batch that is not full (default), or drop it")  # fmt: skip
    how.add_argument("--image-size", type=int, default=224, metavar="N",
                     help="decoded images are N x N; 0 decodes nothing (default 224)")  # fmt: skip
    how.add_argument("--crop-padding", type=int, metavar="N",
                     help="train_crop=pad with N pixels: small images stay decoded where they fit")  # fmt: skip
    how.add_argument("--budget-bytes", type=arguments.positive, default=BUDGET_BYTES, metavar="N",
                     help=f"memory of one reader (default {BUDGET_BYTES >> 30} GiB)")  # fmt: skip
    how.add_argument("--seed", type=int, default=0, help="of the order, and of --holdout (default 0)")
