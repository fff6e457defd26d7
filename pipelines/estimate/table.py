"""`plan`: which of the three ways in, then the numbers as a table of 80 columns or as JSON."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.config import BuildConfig
from pipelines.estimate import inputs
from pipelines.estimate.model import Forecast, Reading, StoredSet, forecast
from pipelines.estimate.prices import Prices
from pipelines.write import summary
from shardset.errors import ConfigError

REFUSED = 2
"""The exit code of a command line that a run would refuse too."""

_SIZES = ("num_shards", "samples_per_shard", "remainder", "balance", "repeat", "target_samples", "holdout")


def run(args: argparse.Namespace) -> int:
    """Shows the plan that the arguments ask for."""
    stored = stored_of(args)
    found = forecast(stored, split_of(stored, args.split), reading_of(args), prices_of(args))
    if args.json:
        print(json.dumps(to_json(found)))
    else:
        show(found, Console())
    return REFUSED if found.refusals else 0


def stored_of(args: argparse.Namespace) -> StoredSet:
    """The shard set by the one way in that was given; raises ConfigError for none or several."""
    ways = {"MANIFEST": args.manifest, "--source": args.source, "--samples": args.samples}
    given = [name for name, value in ways.items() if value]
    if len(given) != 1:
        raise ConfigError(
            f"plan takes {' and '.join(given) or 'nothing'}, expected one of MANIFEST, --source with --input, "
            "or --samples with --mean-bytes"
        )
    _refuse_strangers(args, given[0])
    if args.manifest:
        return inputs.from_manifest(args.manifest)
    config = BuildConfig(
        source=args.source or "", input=args.input or "", output="", seed=args.seed,
        **{name: getattr(args, name) for name in _SIZES},
    )  # fmt: skip
    if args.source:
        return inputs.from_listing(config)
    return inputs.from_numbers(config, args.samples, mean_bytes=args.mean_bytes, num_classes=args.classes or 1)


def _refuse_strangers(args: argparse.Namespace, way: str) -> None:
    belong = {"--input": "--source", "--mean-bytes": "--samples", "--classes": "--samples", "--holdout": "--source"}
    values = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in belong}
    for flag, owner in belong.items():
        if values[flag] and way != owner:
            raise ConfigError(f"{flag} goes with {owner}, not with {way}; leave one of them out")
    for flag, owner in (("--input", "--source"), ("--mean-bytes", "--samples")):
        if way == owner and not values[flag]:
            raise ConfigError(f"{owner} needs {flag} too; see the examples of `plan --help`")
    changed = [name for name in _SIZES if getattr(args, name) not in ({}, "spread", "none")]
    if way == "MANIFEST" and changed:
        flag = "--" + changed[0].replace("_", "-")
        raise ConfigError(f"{flag}: the shards of a set that stands have their sizes; leave it out")


def split_of(stored: StoredSet, wanted: str | None) -> str:
    """The split whose reading is planned: the one asked for, `train`, or the only one."""
    names = list(stored.splits)
    if wanted is None and "train" not in names and len(names) > 1:
        raise ConfigError(f"which split is read? there are {', '.join(names)}; name one with --split")
    name = wanted or ("train" if "train" in names else names[0])
    if name not in names:
        raise ConfigError(f"no split {name!r}; there are {', '.join(names)}")
    return name


def reading_of(args: argparse.Namespace) -> Reading:
    """How the split is read."""
    return Reading(
        global_batch_size=args.global_batch_size,
        num_replicas=args.world,
        num_hosts=args.hosts,
        strategy=args.strategy,
        num_lanes=args.num_lanes,
        block_size=args.block_size,
        window=args.window,
        seed=args.seed,
        last_batch=args.last_batch,
        image_size=args.image_size,
        crop_padding=args.crop_padding,
        budget_bytes=args.budget_bytes,
        num_workers=args.workers,
    )


def prices_of(args: argparse.Namespace) -> Prices:
    """What the bucket costs."""
    return Prices(storage=args.price_storage, class_a=args.price_class_a, class_b=args.price_class_b)


def show(found: Forecast, console: Console) -> None:
    """The splits, then what reading one of them takes, then advice, then what all that is marked rests on."""
    title = found.stored.title + _mark(found, "splits")
    console.print(summary.split_table(title, [split.plan for split in found.stored.splits.values()]))
    console.print(f"\n{heading(found)}", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, name, text in lines(found):
        table.add_row(name + _mark(found, key), Text(text))
    console.print(table)
    for sentence in found.advice:
        console.print(Text(f"\n- {sentence}{_mark(found, 'advice')}"))
    for sentence in found.refusals:
        console.print(Text(f"\nrefused: {sentence}{_mark(found, 'refusals')}", style="bold red"))
    for assumption in found.stored.assumptions:
        console.print(Text(f"\n* assumed: {assumption.text}."))


_ON_BYTES = frozenset(
    ("splits", "manifest_bytes", "stored_bytes", "order", "mixing", "reads", "cold_start", "memory", "build", "dollars",
     "advice", "refusals")
)  # fmt: skip
_RESTS_ON = {
    "samples": _ON_BYTES | {"steps"},
    "bytes": _ON_BYTES,
    "classes": frozenset(("num_classes", "mixing", "manifest_bytes", "stored_bytes", "dollars")),
}
"""What of the JSON depends on what may be assumed; `num_classes` of an archive of known size is the published one."""


def assumed(found: Forecast) -> list[str]:
    """The parts of the JSON that rest on an assumption."""
    return sorted(frozenset().union(*(_RESTS_ON[about] for about in found.stored.assumed)))


def _mark(found: Forecast, key: str) -> str:
    return " *" if key in assumed(found) else ""


def heading(found: Forecast) -> str:
    """Who reads what."""
    reading = found.reading
    replicas, hosts = _count(reading.num_replicas, "replica"), _count(reading.num_hosts, "host")
    readers = f"{reading.strategy}: {_count(reading.num_readers, 'reader')}"
    return f"{found.split}, read in batches of {reading.global_batch_size:,} by {replicas} on {hosts} ({readers})"


def lines(found: Forecast) -> Iterator[tuple[str, str, str]]:
    """The rows of the second table: of which part of the JSON, what, and how much of it."""
    order, steps, stored = found.order, found.steps, found.stored.splits[found.split]
    about = "about " if found.stored.assumptions else ""
    last = f", the last with {steps.num_last:,} samples" if steps.num_pads else ""
    yield "steps", "steps", f"{steps.num_steps:,} an epoch{last}"
    yield "order", "order", f"L = {order.num_lanes} lanes, q = {order.block_size}, w = {order.window} (docs/order.md)"
    if found.mixing:
        yield (
            "mixing",
            "shuffle",
            f"{found.mixing.worst:.0f} of {found.mixing.num_classes:,} classes in a batch if they were stored class by "
            f"class; {found.mixing.uniform:.0f} from a uniform shuffle, which the order of a build comes near",
        )
    if found.cold:
        yield (
            "cold_start",
            "cold start",
            f"{about}{_size(found.cold.num_bytes)} before the first batch: {_size(found.cold.manifest_bytes)} "
            f"manifest, {_size(found.cold.index_bytes)} indexes, {_size(found.cold.sample_bytes)} samples; "
            f"{_size(found.cold.num_bytes / found.reading.num_readers)} a reader",
        )
    yield from _read_lines(found, about)
    if found.memory:
        parts = ", ".join(
            f"{_size(getattr(found.memory, name))} {name}"
            for name in ("raw", "decoded", "indexes", "cache")
            if getattr(found.memory, name)
        )
        total = found.memory.total * found.readers_per_host
        each = f" ({_count(found.readers_per_host, 'reader')})" if found.readers_per_host > 1 else ""
        yield "memory", "memory", f"at most {_size(total)} a host{each}: {parts}{' each' if each else ''}"
    mean = f"{about}{stored.mean_bytes:,.0f} bytes a sample in its tar"
    price = _dollars(found.prices.month(found.stored.num_bytes))
    yield "stored_bytes", "storage", f"{about}{_size(found.stored.num_bytes)} in all splits, {price} a month; {mean}"
    if found.build:
        cost = found.prices.requests(class_a=found.build.class_a, class_b=found.build.class_b)
        yield (
            "build",
            "build",
            f"about {found.build.class_b:,} reads and {found.build.class_a:,} writes and lists, {_dollars(cost)}, if "
            "the raw files are in a bucket",
        )


def _read_lines(found: Forecast, about: str) -> Iterator[tuple[str, str, str]]:
    reads, prices = found.reads, found.prices
    if reads is None:
        return
    single = reads.first_batch_gets + reads.pad_gets
    yield (
        "reads",
        "requests",
        f"{reads.first_gets:,} in the first epoch, {_dollars(prices.requests(class_b=reads.first_gets))}: "
        f"{reads.block_gets:,} reads of blocks, {single:,} of single samples, {reads.index_gets:,} of indexes, "
        f"{reads.looks:,} looks at shards; hedging adds 3 % at most. Each epoch after it {reads.later_gets:,}, "
        f"{_dollars(prices.requests(class_b=reads.later_gets))}",
    )
    yield (
        "reads",
        "bytes read",
        f"{about}{_size(reads.num_bytes)} of samples in the first epoch, amplification {reads.amplification:.3f}; "
        f"{_size(reads.index_bytes)} of indexes",
    )


def to_json(found: Forecast) -> dict[str, Any]:
    """The same for programs; bytes, counts and US dollars."""
    reads, memory, cold = found.reads, found.memory, found.cold
    return {
        "exact": not found.stored.assumptions,
        "assumptions": [asdict(assumption) for assumption in found.stored.assumptions],
        "assumed": assumed(found),
        "splits": {name: _split_json(split) for name, split in found.stored.splits.items()},
        "num_classes": found.stored.num_classes,
        "manifest_bytes": found.stored.manifest_bytes,
        "stored_bytes": found.stored.num_bytes,
        "split": found.split,
        "reading": asdict(found.reading) | {"num_readers": found.reading.num_readers},
        "order": {"L": found.order.num_lanes, "q": found.order.block_size, "w": found.order.window},
        "steps": asdict(found.steps),
        "mixing": asdict(found.mixing) if found.mixing else None,
        "reads": asdict(reads) | {"first_gets": reads.first_gets, "later_gets": reads.later_gets} if reads else None,
        "cold_start": asdict(cold) | {"num_bytes": cold.num_bytes} if cold else None,
        "memory": asdict(memory) | {"total": memory.total, "readers_per_host": found.readers_per_host}
        if memory
        else None,
        "build": asdict(found.build) if found.build else None,
        "dollars": _dollars_json(found),
        "advice": found.advice,
        "refusals": found.refusals,
    }


def _split_json(split: Any) -> dict[str, Any]:
    plan = split.plan
    return {
        "num_source_samples": plan.num_source,
        "num_samples": plan.num_stored,
        "num_dropped": plan.num_dropped,
        "num_repeats": plan.num_repeats,
        "num_shards": plan.num_shards,
        "smallest_shard": min(split.shard_sizes),
        "largest_shard": max(split.shard_sizes),
        "tar_bytes": split.num_bytes,
        "index_bytes": sum(split.index_bytes),
        "mean_bytes": split.mean_bytes,
    }


def _dollars_json(found: Forecast) -> dict[str, float | None]:
    prices, reads, build = found.prices, found.reads, found.build
    return {
        "storage_month": prices.month(found.stored.num_bytes),
        "build": prices.requests(class_a=build.class_a, class_b=build.class_b) if build else None,
        "first_epoch": prices.requests(class_b=reads.first_gets) if reads else None,
        "later_epoch": prices.requests(class_b=reads.later_gets) if reads else None,
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} PB"


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.01 or amount == 0 else "under $0.01"
