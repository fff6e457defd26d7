"""What it costs to change a set: an append of 1 %, a compaction, adopting the same tars;
docs/how-to/versions.md.

    python -m benchmarks.changes [--images 4000] [--rounds 5] [--folder /tmp]

Whole processes, medians; the images are JPEGs of 112 KB in class folders.
"""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import shardset
from benchmarks import inputs
from benchmarks.environment import REPOSITORY, today
from benchmarks.measuring import Run, of_checkout, parser_of, watch


def main() -> None:
    """Prints a table of what each change wrote and took."""
    flags = parser_of(__doc__)
    flags.add_argument("--images", type=int, default=4_000)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument(
        "--folder",
        type=Path,
        help="where the sets are (the default is the system's temporary folder)",
    )
    asked = flags.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        rounds = [
            one_round(Path(name) / str(number), asked.images) for number in range(asked.rounds)
        ]
    print(f"{today()}; {asked.images:,} images, medians of {asked.rounds}\n\n| | |\n|---|---|")
    for what in rounds[0]:
        values = [found[what] for found in rounds]
        print(f"| {what} | {median(values):.4g} | {min(values):.4g} to {max(values):.4g} |")


def one_round(folder: Path, num_images: int) -> dict[str, float]:
    """The figures of one set that is built, appended to, compacted and, without its indexes,
    adopted.
    """
    first, more, out, tars, keys = (
        folder / name for name in ("first", "more", "set", "tars", "keys.txt")
    )
    inputs.make("folders", first, num_images)
    inputs.make("folders", more, num_images // 100)
    # its classes are the first of the set, its names are others
    for path in [*more.rglob("*.JPEG")]:
        path.rename(path.with_stem(f"more-{path.stem}"))
    found: dict[str, float] = {}

    def timed(what: str, words: Sequence[str], output: Path = out) -> Run:
        run = watch(words, output, folder / "log.txt", of_checkout(REPOSITORY))
        found[f"{what}, s"] = run.seconds
        return run

    def pipelines(command: str) -> list[str]:
        return [sys.executable, "-m", "pipelines", *command.split()]

    sizes = f"--samples-per-shard {num_images // 10} --no-report"
    build = f"build --source folder --input {first} --output {out} {sizes}"
    built = timed("build", pipelines(build))
    before = _files(out)
    appended = timed("append", pipelines(f"append {out} --source folder --input {more}"))
    after = _files(out)
    new_images = sum(path.stat().st_size for path in more.rglob("*.JPEG"))
    changed = {
        path
        for path, seen in before.items()
        if after.get(path) != seen and not path.startswith("plan/")
    }
    found["old files changed or removed, but manifest.json"] = len(changed - {"manifest.json"})
    found["bytes of the append / bytes of its images"] = (
        appended.num_bytes - built.num_bytes
    ) / new_images
    shards = shardset.load(str(out)).manifest.split("train").shards
    with shardset.open(str(out), "train") as samples:
        keys.write_text("".join(f"{samples[shards[number].first_id].key}\n" for number in (1, 3)))
    compact = pipelines(f"compact {out} --drop-keys {keys}")
    timed("compact, two samples of two shards", compact)
    tars.mkdir()
    for number, shard in enumerate(shards):
        shutil.copy(out / shard.path, tars / f"t-{number:06d}.tar")
    names = [str(path) for path in sorted(tars.iterdir())]
    read = timed("reading the tars once", ["sh", "-c", 'cat "$@" > /dev/null', "cat", *names], tars)
    adopted = timed("adopt the same tars", pipelines(f"adopt --input {tars}"), tars)
    found["adopt, CPU s"], found["adopt, tars in MB"] = adopted.cpu_s, read.num_bytes / 1e6
    shutil.rmtree(folder)
    return found


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of each file, by its path."""
    stats = ((path, path.stat()) for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) for path, stat in stats}


if __name__ == "__main__":
    main()
