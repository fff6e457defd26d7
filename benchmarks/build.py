"""Compares builds of shards from the same raw files, by this project and by others, in turns.

python -m benchmarks.build [--scale S] [--repeats N] [--inputs folders,imagenet] [--folder DIR] [--add]
python -m benchmarks.build --against CHECKOUT [--scale S] [--repeats N] [--folder DIR]

--scale 1 is 10,000 photographs. Every contestant runs on the whole input and on a fifth of it, each as a process of its
own. The steady rate is that of the additional images in the additional time, so that it holds all work on images and no
start-up. Writes `docs/benchmarks/build.json` and the tables of `build.md` after each run. With --against it only
compares builds from class folders by this checkout and by another one, whole processes.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import environment, inputs, peers_write, report
from benchmarks.measuring import Run, compare, watch

FIFTH = 0.2
SOURCES = {"folders": "folder", "imagenet": "imagenet"}
OUTPUT = environment.REPOSITORY / "docs" / "benchmarks" / "build"


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
    ours = ["-m", "pipelines", "build", "--source", SOURCES[kind], "--input", places[1], "--output", places[2]]
    ours += ["--no-report", "--num-shards", str(peers_write.NUM_SHARDS)]
    found = [
        Contestant(
            f"shardset, --verify {verify}",
            "ours",
            [sys.executable, *ours, "--verify", verify],
            True,
        )
        for verify in ("none", "decode")
    ]
    found += [
        Contestant("webdataset ShardWriter", "peer", [peers, script, "webdataset", *places], True),
        Contestant("MosaicML MDSWriter", "peer", [peers, script, "mds", *places], True),
        Contestant("LitData optimize", "peer", [peers, script, "litdata", *places], True),
        Contestant("pool of TarWriters, unshuffled", "peer", [peers, script, "pool", *places], False),
        Contestant("tar cf", "limit", ["tar", "cf", f"{output}/all.tar", "-C", str(folder), "."], False),
        Contestant(report.DECODING, "limit", [sys.executable, script, "decode", *places], False),
    ]
    return found


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
    kinds: Sequence[str], only: Sequence[str], scale: float, repeats: int, folder: Path, before: Sequence[report.Result]
) -> Iterator[list[report.Result]]:
    """All results after each run: contestants in turns, each turn beginning with another; `before` are added to."""
    peers = environment.peers_python()
    order = {one.name: number for number, one in enumerate(contestants("folders", folder, folder, peers))}
    results = {(one.kind, one.name): one for one in before}
    for kind in kinds:
        names = [one.name for one in contestants(kind, folder, folder, peers) if any(part in one.name for part in only)]
        for turn in range(repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                one = _one_more(results.get((kind, name)), kind, name, scale, folder, peers)
                results[kind, name] = one
                print(f"{kind} {name}: {one.runs[-1][0].seconds:.1f} s, run {len(one.runs)}", flush=True)
                yield sorted(
                    results.values(), key=lambda one: (list(SOURCES).index(one.kind), order.get(one.name, len(order)))
                )


def _one_more(
    before: report.Result | None, kind: str, name: str, scale: float, folder: Path, peers: str
) -> report.Result:
    """The result of a contestant with one more pair of runs."""
    sizes, runs = [], []
    for fraction in (1, FIFTH):
        place = folder / f"{kind}-{scale * fraction:g}"
        sizes.append(inputs.make(kind, place, max(30, round(inputs.FULL_SIZE * scale * fraction))))
        contestant = next(one for one in contestants(kind, place, folder / "output", peers) if one.name == name)
        runs.append(run_once(contestant, folder, folder / "output"))
    num_images = (sizes[0], sizes[1])
    if before and before.num_images != num_images:
        raise SystemExit(
            f"{kind}, {name}: {before.num_images} images in the runs before, now {num_images}; same --scale?"
        )
    return report.Result(
        kind=kind, name=name, role=contestant.role, shuffles=contestant.shuffles, num_images=num_images,
        runs=[*(before.runs if before else []), (runs[0], runs[1])],
    )  # fmt: skip


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


def read_results(path: Path) -> list[report.Result]:
    """The results that an earlier call wrote."""
    return [
        report.Result(
            **{**one, "num_images": tuple(one["num_images"]), "runs": [(Run(**a), Run(**b)) for a, b in one["runs"]]}
        )
        for one in json.loads(path.read_text())["results"]
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of the inputs' sizes (see above)")
    parser.add_argument("--only", default="", metavar="PART,...", help="contestants with that in their name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inputs", default=",".join(SOURCES))
    parser.add_argument("--folder", type=Path, default=environment.REPOSITORY / ".tools" / "bench")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the .json and .md, without extension")
    parser.add_argument(
        "--add", action="store_true", help="keep the runs of earlier calls (same scale) and add to them"
    )
    parser.add_argument("--write", action="store_true", help="write the page from the .json and run nothing")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="only compare with this other checkout")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.against:
        against(args.against, args.scale, args.repeats, args.folder.resolve())
        return
    results, page = args.output.with_suffix(".json"), args.output.with_suffix(".md")
    if args.write:
        report.write(page, json.loads(results.read_text())["facts"], read_results(results))
        return
    before = read_results(results) if args.add else []
    ours = ["apache-beam", "pillow", "pyarrow"]
    peers = ["webdataset", "mosaicml-streaming", "litdata", "torch"]
    facts = {
        "machine": environment.machine(),
        "commit": environment.commit(),
        "folder": str(args.folder),
        "load": f"Before the first run of the last call the machine's load was {os.getloadavg()[0]:.1f} (one minute).",
        **environment.versions(sys.executable, ours),
        **environment.versions(environment.peers_python(), peers),
    }
    turns = measure(args.inputs.split(","), args.only.split(","), args.scale, args.repeats, args.folder, before)
    for found in turns:
        content = {"facts": facts, "results": [asdict(one) for one in found]}
        results.write_text(json.dumps(content, indent=1) + "\n")
        report.write(page, facts, found)


if __name__ == "__main__":
    main()
