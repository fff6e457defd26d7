"""The command line: for each verb, a function that turns arguments into records and calls the
modules that do the work.

Each verb imports its own heavy modules: Beam alone takes a second or two.
"""

import argparse
import atexit
import gc
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.console import Console

from pipelines.config import SIZES, AdoptConfig, BareNumbers, BuildConfig, ColumnConfig
from pipelines.images.options import ImageOptions, options_of
from pipelines.parsers import parser
from pipelines.worker_output import quiet_workers
from shardset.errors import ConfigError
from shardset.program import FAILED, OK, USAGE, run_program, run_verb
from shardset.settings import record_of, texts_of
from shardset.terminal import on_standard_output

if TYPE_CHECKING:
    from pipelines.estimate.stored import StoredSet

WITH_BEAM = ("build", "append", "adopt", "column")
"""The verbs that take the flags of Beam too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code."""
    args, rest = parser().parse_known_args(argv)
    if rest:
        _refuse_unknown(args, rest)
    args.beam_flags = rest
    # A runner logs the traceback of a failing worker many times; run_verb prints the one sentence
    # that matters.
    logging.basicConfig(level=logging.INFO if args.debug else logging.ERROR)
    logging.getLogger("apache_beam").setLevel(logging.INFO if args.debug else logging.CRITICAL)
    # The library warns when a bucket does not answer: keep that visible.
    logging.getLogger("shardset").setLevel(logging.INFO if args.debug else logging.WARNING)
    verb = VERBS[args.verb]
    return run_verb(
        lambda: verb(args),
        debug=args.debug,
        is_interactive=verb in (_inspect, _estimate),
    )


def _refuse_unknown(args: argparse.Namespace, unknown: Sequence[str]) -> None:
    """Ends the program for arguments that neither the verb nor, where it runs, Beam takes."""
    if args.verb not in WITH_BEAM:
        args.verb_parser.error(
            f"unknown arguments: {' '.join(unknown)}{args.verb_parser.near_miss(unknown[0])}"
        )
    from pipelines.runners.beam_options import unknown_flags

    if unknown := unknown_flags(unknown):
        near = args.verb_parser.near_miss(unknown[0])
        neither = "" if near else f" (neither a flag of {args.verb} nor of Apache Beam)"
        args.verb_parser.error(f"unknown arguments: {' '.join(unknown)}{near or neither}")


def _build(args: argparse.Namespace) -> int:
    with quiet_workers(show=args.debug) as console:
        if args.verb == "append":
            config = _append_config(args)
        else:
            config = record_of(BuildConfig, args, image=record_of(ImageOptions, args))
        from pipelines import sources

        sources.open_source(config)  # refuses what it can before the seconds of Beam's import
        gc.disable()  # otherwise collections walk through what the imports make
        from pipelines import build, summary
        from pipelines.runners import progress

        if args.report:
            # early, so that a missing library does not fail a finished build
            from pipelines.report import set_page
        gc.freeze()
        gc.enable()
        if not args.wait:
            job = build.submit(config, args.beam_flags)
            return _show(args, {"job": job}, [job])
        run = build.dry_run if args.dry_run else build.build
        result = run(config, args.beam_flags, progress.BuildProgress(console))
    report = set_page.after_build(config) if result.published and args.report else None
    if args.json:
        return _show(args, {**summary.to_json(config, result), "report": report})
    summary.show(config, result, on_standard_output())
    if report:
        print(f"report: {report}")
    if result.published:
        print(f"next: shardset verify {quote(config.output)}")
    return OK


def _publish(args: argparse.Namespace) -> int:
    """The verbs `adopt` and `column`."""
    with quiet_workers(show=args.debug) as console:
        from pipelines.sets import adopt, column
        from shardset.format.columns import num_values_of

        if args.verb == "adopt":
            made = adopt.adopt(record_of(AdoptConfig, args), args.beam_flags, console)
        else:
            made = column.column(record_of(ColumnConfig, args), args.beam_flags, console)
    manifest, storage, _ = made
    counts = {name: split.num_samples for name, split in manifest.splits.items()}
    facts, notes = manifest.provenance.options, manifest.provenance.notes
    rejected, digest = manifest.quarantine.count, manifest.digest
    answer = dict(set=storage.url, num_samples=counts, digest=digest, quarantined=rejected)
    lines = [_set_line(args.verb, storage.url, counts, digest)]
    if "num_values" in facts:
        kind = f" of {np.dtype(facts['dtype'])} {facts['shape']}" if "dtype" in facts else ""
        facts = facts | {"num_values": num_values_of(manifest.provenance)}
        lines.append(f"values: {facts['num_values']:,}{kind}")
    if rejected:
        lines.append(f"quarantined: {rejected:,}: see {storage.url}/{manifest.quarantine.path}")
    lines += [f"note: {note}" for note in notes]
    answer |= {"notes": notes, **facts}
    return _show(args, answer, [*lines, f"next: shardset verify {quote(storage.url)}"])


def _set_line(verb: str, url: str, counts: Mapping[str, int], digest: str) -> str:
    """The samples of each split of a set that a verb has made."""
    listed = ", ".join(f"{name} {number:,}" for name, number in counts.items())
    return f"{verb} {url}: {listed}; digest {digest[:12]}"


def _append_config(args: argparse.Namespace) -> BuildConfig:
    """An append stores images as the build of the set did."""
    from pipelines.write import replace

    image = options_of(replace.newest_of(args.output)[0])
    return record_of(BuildConfig, args, image=image, append=args.append or "skip")


def _verify(args: argparse.Namespace) -> int:
    from pipelines.check import verify
    from pipelines.runners import progress

    show = progress.verifying(Console(stderr=True))
    report = verify.verify(args.set, deep=args.deep, progress=show)
    answer = {"ok": report.ok, **msgspec.to_builtins(report)}
    return _show(args, answer, verify.lines(report), FAILED if report.problems else OK)


def _versions(args: argparse.Namespace) -> int:
    """The verbs `tag`, `log`, `diff` and `compact`."""
    from pipelines.sets import compact, keys, version_history

    answer: Any
    if args.verb == "tag":
        answer = version_history.tag(args.set, args.name)
        lines = [f"{args.name} is version {answer.version}, digest {answer.digest[:12]}"]
    elif args.verb == "log":
        answer = version_history.log(args.set)
        lines = version_history.log_lines(answer)
    elif args.verb == "diff":
        answer = version_history.diff(args.old, args.new)
        lines = version_history.diff_lines(answer)
    else:
        answer = compact.compact(
            args.set,
            keys.read_keys(args.drop_keys),
            grace=timedelta(hours=args.grace),
            now=datetime.now(UTC),
            side_files=args.side_files,
        )
        lines = compact.lines(answer)
        if not answer.waiting:
            lines.append(f"next: shardset verify {quote(args.set)}")
    return _show(args, answer, lines)


def _show(
    args: argparse.Namespace, answer: object, lines: Sequence[str] = (), code: int = OK
) -> int:
    """Prints what a verb found, as JSON or in these lines; returns its exit code."""
    print(json.dumps(msgspec.to_builtins(answer), indent=1) if args.json else "\n".join(lines))
    return code


def _inspect(args: argparse.Namespace) -> int:
    from pipelines.check import inspect, render

    answer = inspect.inspect(
        args.set,
        split=args.split,
        shard=args.shard,
        key=args.key,
        name=args.name,
        class_name=args.class_name,
    )
    if args.json:
        return _show(args, answer)
    on_standard_output().print(render.render(answer))
    return OK


def _export(args: argparse.Namespace) -> int:
    from pipelines.export import side_files

    exported = side_files.export(args.set, args.to, output=args.output, overwrite=args.overwrite)
    return _show(args, exported, side_files.lines(exported))


def _repair(args: argparse.Namespace) -> int:
    from pipelines.sets import repair

    done = repair.repair(args.set, args.input)
    return _show(args, done, repair.lines(done), FAILED if done.failed else OK)


def _report(args: argparse.Namespace) -> int:
    from pipelines.report import set_page

    written = set_page.write(args.set, args.output, max_images=args.images)
    code = FAILED if written.data.damage else OK
    return _show(args, set_page.to_json(written), set_page.summary(written), code)


def _view(args: argparse.Namespace) -> int:
    from pipelines.sets import view_maker

    made = view_maker.make_view(args.output, args.of, record_of(view_maker.Choice, args))
    counts = {name: part.selection.num_kept for name, part in made.splits.items()}
    facts = {"view": args.output, "num_samples": counts, **msgspec.to_builtins(made.head)}
    lines = [
        _set_line("view", args.output, counts, made.head.digest),
        f"next: shardset inspect {quote(args.output)}",
    ]
    return _show(args, facts, lines)


def _estimate(args: argparse.Namespace) -> int:
    from pipelines.estimate import estimate, reading

    stored = _stored_set(args)
    how = record_of(reading.Reading, args)
    figures = estimate.estimate(stored, stored.name_of_split(args.split), how)
    code = USAGE if figures["refusal"] else OK  # for numbers that a run would refuse
    if args.json:
        return _show(args, figures, code=code)
    estimate.show(stored, figures, Console())
    return code


def _stored_set(args: argparse.Namespace) -> "StoredSet":
    """The shard set that MANIFEST or --samples describes; ConfigError for flags that belong to the
    other.
    """
    from pipelines.estimate import stored

    if args.samples is None:
        for name in texts_of(args, ("mean_bytes", "classes", *SIZES)):
            raise ConfigError(
                f"--{name.replace('_', '-')} goes with --samples; an existing set has its sizes, so"
                " leave it out"
            )
        return stored.from_manifest(args.set)
    config = record_of(BuildConfig, args, source="", input="", output="")
    return stored.from_numbers(config, record_of(BareNumbers, args))


VERBS = {
    "build": _build,
    "append": _build,
    **dict.fromkeys(("tag", "log", "diff", "compact"), _versions),
    "adopt": _publish,
    "column": _publish,
    "verify": _verify,
    "inspect": _inspect,
    "export": _export,
    "repair": _repair,
    "estimate": _estimate,
    "report": _report,
    "view": _view,
}


def program() -> None:
    """The entry point of the shell command."""
    # otherwise Python's exit walks through all loaded objects: 0.4 s with Beam
    atexit.register(gc.freeze)
    run_program(main, "pipelines")
