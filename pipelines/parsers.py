"""The parsers of the command line: flags, their defaults and their help."""

import argparse
from typing import TypeAlias

from pipelines import arguments
from pipelines.arguments import Merge
from shardset.format.limits import DECODED_BYTES
from shardset.order.budget import BUDGET_BYTES
from shardset.program import Parser, program_parser

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
    _add_input(where)
    where.add_argument("--within-input", action="store_true",
                       help="refuse a listing with images outside its folder, by links or absolute paths")  # fmt: skip
    where.add_argument("--overwrite", action="store_true",
                       help="replace the shard set at the output, or restart an unfinished build")  # fmt: skip
    where.add_argument("--only-shards", action=Merge, type=arguments.shard_numbers, default=frozenset(),
                       metavar="SPLIT:0,4-7",
                       help="write only these; in a finished set, mend those that are missing or damaged")  # fmt: skip
    where.add_argument("--max-listed-shards", type=int, default=10_000, metavar="N",
                       help="list up to N shards in manifest.json itself, and more in pages beside it (format version "
                            "2; default 10,000)")  # fmt: skip
    where.add_argument("--dry-run", action="store_true", help="read all input, print the exact plan, write nothing")
    where.add_argument("--no-report", action="store_true", help="do not write report.html, a page about the set")
    size = _add_sizes(build)
    size.add_argument("--seed", type=int, default=0, help="seed of the order in which samples are stored (default 0)")
    check = build.add_argument_group("bad input")
    check.add_argument("--verify", choices=["decode", "header", "none"], default="decode",
                       help="how to check each image; only decode (default) finds truncated ones")  # fmt: skip
    check.add_argument("--on-bad", choices=["quarantine", "fail"], default="quarantine",
                       help="list bad samples and go on (default), or fail")  # fmt: skip
    check.add_argument("--max-bad-fraction", type=float, default=0.01, metavar="F",
                       help="fail before writing if more than this of a split, and more than 10 samples, are bad "
                            "(default 0.01; 0 allows none)")  # fmt: skip
    image = build.add_argument_group("images (default: stored byte for byte)")
    image.add_argument("--resize", type=arguments.shorter_side, metavar="shorter=N",
                       help="shrink images until their shorter side is N")  # fmt: skip
    image.add_argument("--quality", type=int, default=95, metavar="N",
                       help="quality of re-encoded JPEG and WebP, 1 to 100 (default 95)")  # fmt: skip
    image.add_argument("--image-format", choices=["keep", "jpg", "png", "ppm", "webp"], default="keep",
                       help="convert images to this format; keep (default) leaves each in its own")  # fmt: skip
    image.add_argument("--background", default="white", metavar="COLOUR",
                       help="behind transparent pixels when re-encoding: white (default), black, #rrggbb")  # fmt: skip
    image.add_argument("--decoded-bytes", type=arguments.positive, default=DECODED_BYTES, metavar="N",
                       help="memory of the images that a worker decodes at once (default "
                            f"{DECODED_BYTES >> 30} GiB)")  # fmt: skip
    image.add_argument("--jpeg-restart", action="store_true",
                       help="rewrite JPEGs without loss, so that readers decode only what a crop needs")  # fmt: skip


def _add_input(group: argparse._ArgumentGroup) -> None:
    """The options that decide which samples a source has."""
    group.add_argument("--holdout", action=Merge, type=arguments.fractions, default={}, metavar="SPLIT=FRACTION",
                       help="move this fraction of each class into its own split, chosen by the keys of the samples; a "
                            "class with two or more has some in each part")  # fmt: skip
    group.add_argument("--class-depth", type=arguments.positive, default=1, metavar="N",
                       help="folder: the first N folders name the class, animals/birds with 2 (default 1)")  # fmt: skip
    group.add_argument("--path-column", "--image-column", metavar="NAME",
                       help="listing, hf: the column of the images (default: path, image, file, ...)")  # fmt: skip
    group.add_argument("--label-column", metavar="NAME",
                       help="listing, hf: the column of the labels (default: label, class, category, target, ..., or "
                            "the ClassLabel of the schema); '' stores images without labels")  # fmt: skip


def _add_sizes(verb: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    size = verb.add_argument_group("sizes (a number, or SPLIT=NUMBER,SPLIT=NUMBER)")
    size.add_argument("--num-shards", action=Merge, type=arguments.numbers, default={}, metavar="N",
                      help="shards of each split; or give --samples-per-shard")  # fmt: skip
    size.add_argument("--samples-per-shard", action=Merge, type=arguments.numbers, default={}, metavar="N",
                      help="default: about 128 MiB a shard; up to 4 shards of 100 samples or more")  # fmt: skip
    size.add_argument("--remainder", choices=["spread", "drop", "pad"], default="spread",
                      help="samples that do not divide evenly: spread (sizes differ by one, default), drop, or pad "
                           "with repeats")  # fmt: skip
    size.add_argument("--balance", choices=["none", "stratified"], default="none",
                      help="stratified: the same class mix in every shard, within one sample")  # fmt: skip
    size.add_argument("--repeat", action=Merge, type=arguments.numbers, default={}, metavar="K",
                      help="store every sample K times")  # fmt: skip
    size.add_argument("--target-samples", action=Merge, type=arguments.numbers, default={}, metavar="N",
                      help="store N samples, repeating where there are fewer")  # fmt: skip
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
    report.add_argument("--input", metavar="FOLDER", help="the raw input, for pictures of quarantined samples")


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
    _add_input(raw)
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
