"""Compares builds of shards from the same raw files, by this project and by others, in turns.

python -m benchmarks.build [--scale S] [--repeats N] [--inputs folders,imagenet] [--folder DIR]
python -m benchmarks.build --against CHECKOUT [--scale S] [--repeats N] [--folder DIR]

--scale 1 is 10,000 photographs. Every contestant runs on the whole input and on a fifth of it, each
as a separate process. The steady rate is the additional images over the additional time, so it
holds all work on images and no start-up. Adds to `docs/dev/benchmarks/build.jsonl` and writes the
tables of `build.md` from all its lines, so remove that file first. With --against it only compares
builds from class folders by this checkout and by another one, complete processes.
"""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import environment, inputs, peers_write, report
from benchmarks.measuring import Run, compare, parser_of, watch

FIFTH = 0.2
SOURCES = {"folders": "folder", "imagenet": "imagenet"}
OUTPUT = environment.REPOSITORY / "docs/dev/benchmarks/build"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to make shards; `role` is ours, peer or limit."""

    name: str
    role: str
    words: Sequence[str]
    shuffles: bool


def contestants(kind: str, folder: Path, output: Path, peers: str) -> list[Contestant]:
    """The contestants for an input of that kind."""
    script = str(Path(peers_write.__file__))
    places = [kind, str(folder), str(output)]
    options = f"--source {SOURCES[kind]} --input {folder} --output {output} --no-report"
    ours = [sys.executable, "-m", "pipelines", "build", *options.split()]
    ours += ["--num-shards", str(peers_write.NUM_SHARDS), "--verify"]
    tar = ["tar", "cf", f"{output}/all.tar", "-C", str(folder), "."]
    tools = {
        "webdataset ShardWriter": "webdataset",
        "MosaicML MDSWriter": "mds",
        "LitData optimize": "litdata",
        "pool of TarWriters, unshuffled": "pool",
    }
    return [
        Contestant(report.PLAIN, "ours", [*ours, "none"], True),
        Contestant(report.CHECKED, "ours", [*ours, "decode"], True),
        *(
            Contestant(name, "peer", [peers, script, tool, *places], tool != "pool")
            for name, tool in tools.items()
        ),
        Contestant("tar cf", "limit", tar, False),
        Contestant(report.DECODING, "limit", [sys.executable, script, "decode", *places], False),
    ]


def run_once(contestant: Contestant, folder: Path, output: Path) -> Run:
    """One run into an empty folder."""
    shutil.rmtree(output, ignore_errors=True)
    if contestant.words[0] == "tar":
        output.mkdir()
    caches = {
        "DATA_OPTIMIZER_CACHE_FOLDER": str(folder / "litdata-1"),
        "DATA_OPTIMIZER_DATA_CACHE_FOLDER": str(folder / "litdata-2"),
    }
    run = watch(contestant.words, output, folder / "log.txt", caches)
    for path in (output, *map(Path, caches.values())):
        shutil.rmtree(path, ignore_errors=True)
    return run


def measure(
    kinds: Sequence[str], only: Sequence[str], scale: float, repeats: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """A line for each run of a contestant on a whole input and a fifth; each turn begins with
    another contestant.
    """
    peers, output = environment.peers_python(), folder / "output"
    for kind in kinds:
        places = [folder / f"{kind}-{scale * fraction:g}" for fraction in (1, FIFTH)]
        sizes = [max(30, round(inputs.FULL_SIZE * scale * fraction)) for fraction in (1, FIFTH)]
        num_images = [inputs.make(kind, *pair) for pair in zip(places, sizes, strict=True)]
        pairs = list(
            zip(*(contestants(kind, place, output, peers) for place in places), strict=True)
        )
        pairs = [pair for pair in pairs if any(part in pair[0].name for part in only)]
        for turn in range(repeats):
            for pair in pairs[turn % len(pairs) :] + pairs[: turn % len(pairs)]:
                runs = [asdict(run_once(one, folder, output)) for one in pair]
                one = pair[0]
                print(f"{kind} {one.name}: {runs[0]['seconds']:.1f} s", flush=True)
                yield {
                    "kind": kind, "name": one.name, "role": one.role, "shuffles": one.shuffles,
                    "num_images": num_images, "runs": runs,
                }  # fmt: skip


def against(other: Path, scale: float, repeats: int, folder: Path) -> None:
    """Compares whole builds by both checkouts and by webdataset's ShardWriter."""
    num_images = max(30, round(inputs.FULL_SIZE * scale))
    place = folder / f"against-{num_images}"
    inputs.make("folders", place, num_images)
    ours, *others = contestants("folders", place, folder / "output", sys.executable)
    writer = next(one for one in others if one.name == "webdataset ShardWriter")
    commands = {
        "this checkout": (ours.words, environment.REPOSITORY),
        str(other): (ours.words, other),
        writer.name: (writer.words, environment.REPOSITORY),
    }
    compare(f"{num_images} images", commands, repeats, folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the inputs' sizes (see above)")
    parser.add_argument(
        "--only", default="", metavar="PART,...", help="contestants with that in their name"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inputs", default=",".join(SOURCES))
    parser.add_argument("--folder", type=Path, default=environment.REPOSITORY / ".tools" / "bench")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help="the .jsonl, which grows, and the .md"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the page from the .jsonl and run nothing"
    )
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="only compare with this other checkout"
    )
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.against:
        against(args.against, args.scale, args.repeats, args.folder.resolve())
        return
    results, page = args.output.with_suffix(".jsonl"), args.output.with_suffix(".md")
    if args.write:
        report.write(page, results)
        return
    ours = ["apache-beam", "pillow", "pyarrow"]
    peers = ["webdataset", "mosaicml-streaming", "litdata", "torch"]
    facts = {
        "machine": environment.machine(),
        "commit": environment.commit(),
        "folder": str(args.folder),
        "load": (
            f"Before the first run of the last call the machine's load was {os.getloadavg()[0]:.1f}"
            " (one minute)."
        ),
        **environment.versions(sys.executable, ours),
        **environment.versions(environment.peers_python(), peers),
    }
    lines = measure(
        args.inputs.split(","), args.only.split(","), args.scale, args.repeats, args.folder
    )
    with results.open("a") as out:
        for line in itertools.chain([{"facts": facts}], lines):
            print(json.dumps(line), file=out, flush=True)
    report.write(page, results)


if __name__ == "__main__":
    main()
