"""`python -m pipelines VERB`: arguments to a configuration to one call."""

import argparse
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

from rich.console import Console

from pipelines.estimate.prices import Prices
from pipelines.runners import forkserver
from pipelines.runners.forkserver import ForkServer
from shardset.format.limits import DECODED_BYTES
from shardset.order.budget import BUDGET_BYTES
from shardset.program import Parser, program_parser, run_program, run_verb

COMMAND = "shardset-pipelines"
"""The installed name of this program; a shell completes commands by name, so not `python -m pipelines`."""

MAX_RANGE = 1_000_000
"""So many shards, at most, are one range of --only-shards."""

_WHOLE = "a whole number from 1"

EXIT_CODES = (
    "exit codes: 0 done; 1 it failed or something is wrong with the data; 2 the command line is wrong; 130 stopped by "
    "Ctrl-C"
)

BUILD_EPILOG = f"""\
sources and what --input is for each:
  cifar10, cifar100   the published .tar.gz (python or binary version), or the folder it is in or was extracted to
  imagenet            a folder with ILSVRC2012_img_train.tar, _img_val.tar and _devkit_t12.tar.gz; the Kaggle tree;
                      or class folders train/WNID/, validation/WNID/
  folder              SPLIT/CLASS/file, or CLASS/file with --holdout test=0.1
  listing             a CSV or JSONL file with the columns path, label and optionally split, key, anything else
  webdataset          a folder of tars, one tar, or a pattern such as 'gs://bucket/train-{{000000..000099}}.tar'

examples:
  python -m pipelines build --source folder --input photos --holdout test=0.1 --output shards
  python -m pipelines build --source imagenet --input /data/ilsvrc --output gs://bucket/imagenet \\
      --samples-per-shard train=1252,validation=1000 --remainder pad
  python -m pipelines build --source cifar10 --input cifar-10-python.tar.gz --output shards \\
      --target-samples train=1280000 --samples-per-shard train=2000

Flags of Apache Beam (--runner, --project, --region, --temp_location, --direct_num_workers, ...) pass through;
without --runner the build runs here, on all cores. A build that was stopped goes on where it was when the same
command is given again.

{EXIT_CODES}
"""


PLAN_EPILOG = f"""\
examples:
  python -m pipelines plan gs://bucket/imagenet --global-batch-size 4096 --world 32 --hosts 4
  python -m pipelines plan --source folder --input photos --holdout test=0.1 --num-shards 8
  python -m pipelines plan --samples train=1281167,validation=50000 --mean-bytes 110000 --classes 1000 \\
      --num-shards train=640,validation=50 --global-batch-size 4096 --world 32 --hosts 4 --workers 8

Sizes, order, steps and memory come from the code that builds and trains. What the numbers mean: docs/plan.md.
A run would refuse what is printed as `refused`, and the exit code is 2 then.

{EXIT_CODES}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code."""
    top, verbs = _parsers()
    args, rest = top.parse_known_args(argv)
    if args.verb == "build":
        _refuse_unknown_flags(verbs["build"], rest)
    elif rest:
        verbs[args.verb].error(f"unknown arguments: {' '.join(rest)}")
    # A runner logs the traceback of a failing worker many times over; the one sentence that counts is printed below.
    logging.basicConfig(level=logging.INFO if args.debug else logging.ERROR)
    logging.getLogger("apache_beam").setLevel(logging.INFO if args.debug else logging.CRITICAL)
    logging.getLogger("shardset").setLevel(
        logging.INFO if args.debug else logging.WARNING
    )  # a bucket that won't answer
    return run_verb(
        lambda: args.run(args, rest), debug=args.debug, stopped="stopped; the same command goes on from here"
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    return _parsers()[0]


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = program_parser(
        COMMAND, "pipelines", description="Raw image files to exact, reproducible WebDataset shards.", epilog=EXIT_CODES
    )
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks, Beam's log and warnings of libraries")
    common.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    return parser, {
        "build": _add_build(verbs, common),
        "verify": _add_verify(verbs, common),
        "inspect": _add_inspect(verbs, common),
        "export": _add_export(verbs, common),
        "plan": _add_plan(verbs, common),
        "report": _add_report(verbs, common),
    }


def _add_build(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    build = verbs.add_parser(
        "build", help="turn raw files into a shard set", parents=[common], epilog=BUILD_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Plan, write, then commit: the manifest appears last, or not at all.",
    )  # fmt: skip
    build.set_defaults(run=_build)
    where = build.add_argument_group("what and where")
    where.add_argument("--source", required=True, help="the raw format, see below")
    where.add_argument("--input", required=True, metavar="PATH", help="local or gs://, see below")
    where.add_argument("--output", required=True, metavar="URL", help="the folder of the shard set, local or gs://")
    where.add_argument("--holdout", action=_Together, type=_shares, default={}, metavar="SPLIT=FRACTION",
                       help="put this share of the samples into a split of its own, chosen by their names")  # fmt: skip
    where.add_argument("--within-input", action="store_true",
                       help="refuse a listing with images outside of its folder, by links or whole paths")  # fmt: skip
    where.add_argument(
        "--overwrite", action="store_true", help="replace the shard set at the output, or start an unfinished one over"
    )
    where.add_argument("--only-shards", action=_Together, type=_slots, default=frozenset(), metavar="SPLIT:0,4-7",
                       help="write only these; mends those of a finished set that are missing or damaged")  # fmt: skip
    where.add_argument("--dry-run", action="store_true", help="print the arithmetic and write nothing")
    where.add_argument("--no-report", action="store_true", help="do not make report.html, a page about the set")
    size = _add_sizes(build)
    size.add_argument("--seed", type=int, default=0, help="of the order in which samples are stored (default 0)")
    check = build.add_argument_group("bad input")
    check.add_argument("--verify", choices=["decode", "header", "none"], default="decode",
                       help="how each image is checked first; only decode (the default) finds cut ones")  # fmt: skip
    check.add_argument("--on-bad", choices=["quarantine", "fail"], default="quarantine")
    check.add_argument("--max-bad-fraction", type=float, default=0.01, metavar="F",
                       help="more than this of a split bad: fail before a shard is written (default 0.01)")  # fmt: skip
    image = build.add_argument_group("images (default: stored byte for byte)")
    image.add_argument("--resize", type=_shorter, metavar="shorter=N", help="shrink so that the shorter side is N")
    image.add_argument("--quality", type=int, default=95, help="of re-encoded JPEG and WebP (default 95)")
    image.add_argument("--image-format", choices=["keep", "jpg", "png", "ppm", "webp"], default="keep")
    image.add_argument("--background", default="white", metavar="COLOUR",
                       help="of what is transparent in re-encoded images: white (default), black, #rrggbb")  # fmt: skip
    image.add_argument("--decoded-bytes", type=_positive, default=DECODED_BYTES, metavar="N",
                       help="memory of the images that a worker decodes at once (default 2 GiB)")  # fmt: skip
    image.add_argument("--jpeg-restart", action="store_true",
                       help="rewrite JPEGs without loss; readers then decode the part that a crop needs")  # fmt: skip
    return build


def _add_sizes(verb: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    size = verb.add_argument_group("sizes (a number, or SPLIT=NUMBER,SPLIT=NUMBER)")
    size.add_argument("--num-shards", action=_Together, type=_numbers, default={}, metavar="N")
    size.add_argument("--samples-per-shard", action=_Together, type=_numbers, default={}, metavar="N",
                      help="default: about 128 MiB a shard, and at least 4 shards")  # fmt: skip
    size.add_argument("--remainder", choices=["spread", "drop", "pad"], default="spread",
                      help="what does not divide: sizes one apart (default), dropped, padded with repeats")  # fmt: skip
    size.add_argument("--balance", choices=["none", "stratified"], default="none",
                      help="stratified: the same class mix in every shard, to within one sample")  # fmt: skip
    size.add_argument(
        "--repeat", action=_Together, type=_numbers, default={}, metavar="K", help="store every sample K times"
    )
    size.add_argument(
        "--target-samples", action=_Together, type=_numbers, default={}, metavar="N", help="store N samples, repeating"
    )
    return size


def _add_verify(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    verify = verbs.add_parser(
        "verify", help="compare a shard set with its manifest", parents=[common], epilog=EXIT_CODES, allow_abbrev=False,
        description="Sizes and checksums of every file; with --deep every sample too.",
    )  # fmt: skip
    verify.add_argument("manifest", metavar="MANIFEST", help="the manifest or its folder, local or gs://")
    verify.add_argument("--deep", action="store_true", help="also decode every image and compare every label and key")
    verify.set_defaults(run=_verify)
    return verify


def _add_inspect(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    inspect = verbs.add_parser(
        "inspect", help="show what is in a shard set", parents=[common], epilog=EXIT_CODES, allow_abbrev=False,
        description="Tables of splits, shards and classes; finds a sample by its key or its original name.",
    )  # fmt: skip
    inspect.add_argument("manifest", metavar="MANIFEST", help="the manifest or its folder, local or gs://")
    inspect.add_argument("--split", help="only this split")
    inspect.add_argument("--shard", type=int, metavar="N", help="the samples of one shard")
    inspect.add_argument("--key", help="where the sample with this key is, and what it was called")
    inspect.add_argument("--name", help="the samples made from the input of this original name")
    inspect.add_argument("--class", dest="class_name", metavar="CLASS", help="a class by label, name or wnid")
    inspect.set_defaults(run=_inspect)
    return inspect


def _add_export(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    export = verbs.add_parser(
        "export", help="write what other readers want beside the tars", parents=[common], epilog=EXIT_CODES,
        allow_abbrev=False,
        description="Side files of other readers, from the manifest and the indexes; no tar is written again. "
                    "wids reads every tar once, for its MD5.",
    )  # fmt: skip
    export.add_argument("manifest", metavar="MANIFEST", help="the manifest or its folder, local or gs://")
    export.add_argument("--to", required=True, action="extend", type=_names, metavar="READER,...",
                        help="any of wids, timm, energon, dali, tfds, hf")  # fmt: skip
    export.add_argument("--output", metavar="FOLDER", help="write them there, where the format allows; default: beside")
    export.add_argument("--overwrite", action="store_true", help="replace files that stand there and differ")
    export.set_defaults(run=_export)
    return export


def _add_plan(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    plan = verbs.add_parser(
        "plan", help="what a shard set takes to build, keep and read", parents=[common], epilog=PLAN_EPILOG,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Samples, shards, steps, requests, memory, mixing and cost, from a manifest, a listing or numbers.",
    )  # fmt: skip
    plan.set_defaults(run=_plan)
    plan.add_argument("manifest", metavar="MANIFEST", nargs="?", help="of a set that stands, or its folder")
    raw = plan.add_argument_group("before a build: a listing, or bare numbers")
    raw.add_argument("--source", help="the raw format, as for build")
    raw.add_argument("--input", metavar="PATH", 
                     help="local or gs://; listed, and a little read of archives (docs/plan.md)")  # fmt: skip
    raw.add_argument(
        "--holdout", action=_Together, type=_shares, default={}, metavar="SPLIT=FRACTION", help="as for build"
    )
    raw.add_argument(
        "--samples", action=_Together, type=_numbers, default={}, metavar="N", help="images, or SPLIT=N,SPLIT=N"
    )
    raw.add_argument("--mean-bytes", type=float, metavar="N", help="mean bytes of an image as it will be stored")
    raw.add_argument("--classes", type=_positive, metavar="N", help="classes of --samples (default: no labels to mix)")
    _add_sizes(plan)
    _add_reading(plan)
    price = plan.add_argument_group(
        "prices in US dollars (default: one region of North America, pipelines/estimate/prices.py)"
    )
    price.add_argument("--price-storage", type=float, default=Prices.storage, metavar="D", help="a GiB a month")
    price.add_argument("--price-class-a", type=float, default=Prices.class_a, metavar="D", help="1,000 writes or lists")
    price.add_argument("--price-class-b", type=float, default=Prices.class_b, metavar="D", help="1,000 reads or looks")
    return plan


def _add_reading(plan: argparse.ArgumentParser) -> None:
    how = plan.add_argument_group("how it is read")
    how.add_argument("--split", help="default: train, or the only one")
    how.add_argument("--global-batch-size", type=_positive, default=256, metavar="B",
                     help="samples a step over all replicas (default 256)")  # fmt: skip
    how.add_argument("--world", type=_positive, default=1, metavar="N", help="replicas (default 1)")
    how.add_argument("--hosts", type=_positive, default=1, metavar="N", help="machines that they run on (default 1)")
    how.add_argument("--strategy", choices=["spmd", "replica", "ddp", "single"], default="spmd",
                     help="who reads: a host (spmd, default), each replica (replica, ddp), one (single)")  # fmt: skip
    how.add_argument("--workers", type=_positive, metavar="N",
                     help="also say how shards divide over plain tar readers, N for each replica")  # fmt: skip
    how.add_argument("--num-lanes", type=_positive, metavar="L", help="default: as the trainer chooses")
    how.add_argument("--block-size", type=_positive, metavar="Q", help="default: as the trainer chooses")
    how.add_argument("--window", type=int, metavar="W", help="default: as the trainer chooses")
    how.add_argument("--last-batch", choices=["pad", "drop"], default="pad", help="what is no full batch (default pad)")
    how.add_argument("--image-size", type=int, default=224, metavar="N",
                     help="decoded images are N x N; 0 decodes nothing (default 224)")  # fmt: skip
    how.add_argument("--crop-padding", type=int, metavar="N",
                     help="train_crop=pad with N pixels: small images stay decoded where they fit")  # fmt: skip
    how.add_argument("--budget-bytes", type=_positive, default=BUDGET_BYTES, metavar="N",
                     help="memory of one reader (default 2 GiB)")  # fmt: skip
    how.add_argument("--seed", type=int, default=0, help="of the order, and of --holdout (default 0)")


def _add_report(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    report = verbs.add_parser(
        "report", help="make one HTML page that shows a shard set", parents=[common], epilog=EXIT_CODES,
        allow_abbrev=False,
        description="Totals, classes, sizes, contact sheets, duplicates, bad input and provenance, for a browser.",
    )  # fmt: skip
    report.add_argument("manifest", metavar="MANIFEST", help="the manifest or its folder, local or gs://")
    report.add_argument("--output", metavar="FILE", help="default: report.html beside the manifest")
    report.add_argument("--force", action="store_true", help="replace whatever file stands at --output")
    report.add_argument("--images", type=int, default=100_000, metavar="N",
                        help="decode at most N images for sizes and near-duplicates (default 100000)")  # fmt: skip
    report.add_argument("--input", metavar="FOLDER", help="the raw input, for pictures of what is in quarantine")
    report.set_defaults(run=_report)
    return report


def _build(args: argparse.Namespace, beam_flags: Sequence[str]) -> int:
    from pipelines.terminal import on_standard_output, quiet_workers

    # Beam takes a second or two to import, so only the verb that needs it does, and its workers at the same time.
    early = not beam_flags and forkserver.num_cores() > 1
    with quiet_workers(show=args.debug) as console, ForkServer() if early else nullcontext() as server:
        from pipelines import build as builds
        from pipelines.config import BuildConfig
        from pipelines.images.encode import ImageOptions
        from pipelines.runners import progress
        from pipelines.write import summary
        from shardset.format import background as backgrounds

        direct = {field.name for field in fields(BuildConfig)} - {"image"}
        config = BuildConfig(
            **{name: getattr(args, name) for name in direct},
            image=ImageOptions(
                resize_shorter=args.resize,
                quality=args.quality,
                image_format=args.image_format,
                jpeg_restart=args.jpeg_restart,
                background=backgrounds.parse(args.background),
                decoded_bytes=args.decoded_bytes,
            ),
        )
        if not args.no_report:
            from pipelines.report import (
                page as report,  # now, so that a missing library shows before the build, not after it
            )
        run = builds.dry_run if args.dry_run else builds.build
        result = run(config, beam_flags, progress.for_console(console), server)
    wanted = result.published is not None and not args.no_report
    page = report.after_build(config) if wanted else None
    if args.json:
        print(json.dumps({**summary.to_json(config, result), "report": page}))
    else:
        summary.show(config, result, on_standard_output())
        if page:
            print(f"report: {page}")
    return 0


def _verify(args: argparse.Namespace, _: Sequence[str]) -> int:
    from pipelines.check import verify
    from pipelines.runners import progress

    with progress.verifying(Console(stderr=True)) as show:
        report = verify.verify(args.manifest, deep=args.deep, progress=show)
    print(verify.to_json(report) if args.json else verify.render(report))
    return 1 if report.problems else 0


def _inspect(args: argparse.Namespace, _: Sequence[str]) -> int:
    from pipelines.check import inspect

    return inspect.run(args)


def _export(args: argparse.Namespace, _: Sequence[str]) -> int:
    from pipelines.export import export

    done = export.export(args.manifest, args.to, output=args.output, overwrite=args.overwrite)
    print(export.to_json(done) if args.json else export.render(done))
    return 0


def _plan(args: argparse.Namespace, _: Sequence[str]) -> int:
    from pipelines.estimate import table

    return table.run(args)


def _report(args: argparse.Namespace, _: Sequence[str]) -> int:
    from pipelines.report import page as report

    return report.run(args)


def _refuse_unknown_flags(parser: argparse.ArgumentParser, flags: Sequence[str]) -> None:
    """Everything that neither we nor Beam know is an error: a misspelled flag must not be silently ignored."""
    if not flags:
        return
    from apache_beam.options.pipeline_options import PipelineOptions

    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for kind in [PipelineOptions, *_subclasses(PipelineOptions)]:
        add: Callable | None = vars(kind).get("_add_argparse_args")
        if add:
            _add_beam_arguments(known, kind)
    _, unknown = known.parse_known_args(list(flags))
    if unknown:
        parser.error(f"unknown arguments: {' '.join(unknown)} (neither a flag of build nor of Apache Beam)")


def _add_beam_arguments(known: argparse.ArgumentParser, kind: type) -> None:
    from apache_beam.options.pipeline_options import _BeamArgumentParser

    own = _BeamArgumentParser(add_help=False, allow_abbrev=False)
    kind._add_argparse_args(own)  # type: ignore[attr-defined]
    for action in own._actions:
        if not {*action.option_strings} & {*known._option_string_actions}:
            known._add_action(action)


def _subclasses(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [found for child in children for found in (child, *_subclasses(child))]


def _numbers(text: str) -> dict[str, int]:
    return {split: _positive(number, f"{_WHOLE}, or SPLIT=NUMBER,SPLIT=NUMBER") for split, number in _pairs(text)}


def _shares(text: str) -> dict[str, float]:
    try:
        return {split: float(number) for split, number in _pairs(text) if split or _fail(text, "SPLIT=FRACTION")}
    except ValueError:
        return _fail(text, "SPLIT=FRACTION, for example test=0.1")


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = [part.rpartition("=") for part in text.split(",")]
    if wrong := _twice([split for split, _, _ in parts]):
        raise argparse.ArgumentTypeError(wrong)
    return [(split, number) for split, _, number in parts]


def _twice(splits: Sequence[str]) -> str:
    """What is wrong where a split is named twice; empty where none is."""
    twins = [repr(split) if split else "all splits" for split, times in Counter(splits).items() if times > 1]
    return f"a number for {twins[0]} twice" if twins else ""


class _Together(argparse.Action):
    """Puts together what a flag says each time it is given; the same split twice is an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        before = getattr(namespace, self.dest)
        if isinstance(values, dict) and (wrong := _twice([*before, *values])):
            raise argparse.ArgumentError(self, wrong)
        setattr(namespace, self.dest, before | values)


def _positive(text: str, expected: str = _WHOLE) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        _fail(text, expected)
    return int(text)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def _shorter(text: str) -> int:
    name, _, number = text.partition("=")
    if name != "shorter":
        _fail(text, "shorter=N, for example shorter=256")
    return _positive(number)


def _slots(text: str) -> frozenset[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for part in text.split(";"):
        split, _, numbers = part.partition(":")
        for span in numbers.split(","):
            first, _, last = span.partition("-")
            numbered = split and first.isdigit() and (last or first).isdigit()
            if not numbered or not 0 <= int(last or first) - int(first) < MAX_RANGE:
                _fail(
                    text,
                    f"SPLIT:NUMBERS, for example train:0,4-7 (ranges go up, at most {MAX_RANGE} long; splits by ;)",
                )
            found |= {(split, number) for number in range(int(first), int(last or first) + 1)}
    return frozenset(found)


def _fail(text: str, expected: str) -> dict:
    raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")


def program() -> None:
    """What a shell runs."""
    run_program(main, "pipelines")


if __name__ == "__main__":
    program()
