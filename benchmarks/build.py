"""Shards from the same raw files with this project and with others, in turns.

python -m benchmarks.build [--scale S] [--repeats N] [--inputs cifar,folders,imagenet] [--folder DIR] [--add]

Every contestant runs on the whole input and on a fifth of it, each as a process of its own. The steady rate is that
of the additional images in the additional time, so that it holds all work on images and no start-up. Writes
`docs/benchmarks/build.json`, `.md` and `.svg`.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import environment, inputs, peers_write, report
from benchmarks.measuring import Run, watch

FIFTH = 0.2
SOURCES = {"cifar": "cifar10", "folders": "folder", "imagenet": "imagenet"}
OUTPUT = environment.REPOSITORY / "docs" / "benchmarks" / "build"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to make shards. `role` is ours, peer or limit."""

    name: str
    role: str
    words: Sequence[str]
    shuffles: bool


def contestants(kind: str, folder: Path, output: Path, peers: str) -> list[Contestant]:
    """Who runs on an input of that kind."""
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
        Contestant(
            "Beam, bytes through GroupByKey", "peer", [sys.executable, "-m", "benchmarks.peers_beam", *places], True
        ),
        Contestant("pool of TarWriters, unshuffled", "peer", [peers, script, "pool", *places], False),
    ]
    if kind == "cifar":
        alone = [sys.executable, script, "encode", *places]
        return [*found, Contestant(report.ENCODING, "limit", alone, False)]
    return [
        *found,
        Contestant("tar cf", "limit", ["tar", "cf", f"{output}/all.tar", "-C", str(folder), "."], False),
        Contestant(report.DECODING_EIGHTH, "limit", [sys.executable, script, "decode_eighth", *places], False),
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
    kinds: Sequence[str], scale: float, repeats: int, folder: Path, before: Sequence[report.Result]
) -> list[report.Result]:
    """All runs of all contestants, in turns, each turn beginning with another one; `before` are added to."""
    peers = environment.peers_python()
    results = {(one.kind, one.name): one for one in before}
    for kind in kinds:
        places = [folder / f"{kind}-{part:g}" for part in (scale, scale * FIFTH)]
        sizes = [
            inputs.make(kind, place, max(30, round(inputs.FULL_SIZE[kind] * part)))
            for place, part in zip(places, (scale, scale * FIFTH), strict=True)
        ]
        field = [contestants(kind, place, folder / "output", peers) for place in places]
        sizes = (sizes[0], sizes[1])
        runs = {one.name: _runs_of(results.get((kind, one.name)), sizes) for one in field[0]}
        first = len(runs[field[0][0].name])
        for turn in range(first, first + repeats):
            for number in range(len(field[0])):
                number = (number + turn) % len(field[0])
                pair = [run_once(each[number], folder, folder / "output") for each in field]
                runs[field[0][number].name].append((pair[0], pair[1]))
                print(
                    f"{kind} {turn + 1}/{first + repeats} {field[0][number].name}: {pair[0].seconds:.1f} s", flush=True
                )
        results |= {
            (kind, one.name): report.Result(
                kind=kind, name=one.name, role=one.role, shuffles=one.shuffles,
                num_images=sizes, runs=runs[one.name],
            )
            for one in field[0]
        }  # fmt: skip
    return sorted(results.values(), key=lambda one: list(SOURCES).index(one.kind))


def read_results(path: Path) -> list[report.Result]:
    """The results that an earlier call wrote."""
    return [
        report.Result(
            **{**one, "num_images": tuple(one["num_images"]), "runs": [(Run(**a), Run(**b)) for a, b in one["runs"]]}
        )
        for one in json.loads(path.read_text())["results"]
    ]


def _runs_of(before: report.Result | None, sizes: tuple[int, int]) -> list[tuple[Run, Run]]:
    if before and before.num_images != sizes:
        raise SystemExit(
            f"{before.kind}: the runs before were of {before.num_images} images, now {sizes}: same --scale"
        )
    return list(before.runs) if before else []


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="1 is 10,000 photographs, 60,000 pictures of CIFAR")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inputs", default=",".join(SOURCES))
    parser.add_argument("--folder", type=Path, default=environment.REPOSITORY / ".tools" / "bench")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where .json, .md and .svg go, without extension")
    parser.add_argument(
        "--add", action="store_true", help="keep the runs of earlier calls (same scale) and add to them"
    )
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    before = read_results(args.output.with_suffix(".json")) if args.add else []
    results = measure(args.inputs.split(","), args.scale, args.repeats, args.folder, before)
    ours = ["apache-beam", "pillow", "pyarrow"]
    peers = ["webdataset", "mosaicml-streaming", "litdata", "torch"]
    facts = {
        "machine": environment.machine(),
        "commit": environment.commit(),
        "folder": str(args.folder),
        **environment.versions(sys.executable, ours),
        **environment.versions(environment.peers_python(), peers),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(
        json.dumps({"facts": facts, "results": [asdict(one) for one in results]}, indent=1) + "\n"
    )
    report.write(args.output, facts, results)


if __name__ == "__main__":
    main()
