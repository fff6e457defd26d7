"""The sweeps of docs/sweep.md: the training stream over shards, threads, batch, q and w.

    python -m benchmarks.sweep --write docs/sweep.md

Makes 1,024 JPEGs of about 110 KB from a seed, builds them into two shard sets, then runs `bench-input --sweep` on the
local disk and on a GCS emulator on this machine, which takes a part of the processor time itself. With `--write` the
tables of the page and the plots beside it are replaced.
"""

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.environment import REPOSITORY, commit, machine
from benchmarks.inputs import make
from pipelines import cli as pipelines
from shardset.storage.open import open_storage
from tests.conftest import BUCKET, emulator
from trainer import cli as trainer

FOLDER = REPOSITORY / ".tools" / "bench-sweep"
NUM_IMAGES = 1024
SETS = {"4-shards": 4, "64-shards": 64}
LOCAL = ["threads=1,2", "batch=64,256"]
REMOTE = ["q=1,8,38", "w=0,256"]


def prepare() -> None:
    """Makes the images and the shard sets unless they exist."""
    make("folders", FOLDER / "raw", NUM_IMAGES)
    for name, num_shards in SETS.items():
        words = ["build", "--source", "folder", "--input", str(FOLDER / "raw"), "--output", str(FOLDER / name)]
        if code := pipelines.main([*words, "--num-shards", str(num_shards), "--verify", "none"]):
            raise SystemExit(code)


@contextmanager
def bucket(folder: Path, log: Path) -> Iterator[str]:
    """The URL of a shard set in an emulator that runs as long as the block."""
    with emulator(log) as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        _copy(folder, f"gs://{BUCKET}/set")
        yield f"gs://{BUCKET}/set"


def _copy(folder: Path, url: str) -> None:
    source, target = open_storage(str(folder)), open_storage(url)
    for found in source.list():
        if not found.name.startswith("plan/"):
            with target.writer(found.name) as out:
                out.write(source.read(found.name))


def run(words: list[str], output: Path, *, seconds: float, rounds: int) -> None:
    """One sweep, into a folder."""
    fixed = ["bench-input", "--set", "image.size=224", "--seconds", str(seconds), "--rounds", str(rounds)]
    if code := trainer.main([*fixed, "--output", str(output), *words]):
        raise SystemExit(code)


def put(page: Path, name: str, found: Path) -> None:
    """Replaces the table of that name in the page, with its plot, which stands beside it."""
    text = (found / "sweep.md").read_text()
    body = text[text.index("\n| ") + 1 : text.index("\n![")]
    head = f"{machine()}; commit {commit()}.\n\n"
    marked = rf"(?<=<!-- table: {name} -->\n).*?(?=<!-- end -->)"
    drawn = f"\n![samples a second](sweep-{name}.svg)\n"
    page.write_text(re.sub(marked, lambda _: head + body + drawn, page.read_text(), flags=re.DOTALL))
    shutil.copyfile(found / "sweep.svg", page.with_name(f"sweep-{name}.svg"))


def main() -> None:
    """Both sweeps, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="local|bucket", help="default: both")
    parser.add_argument("--prepare", action="store_true", help="only make the images and shard sets")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    prepare()
    names = [] if arguments.prepare else arguments.names or ["local", "bucket"]
    with tempfile.TemporaryDirectory() as folder:
        timing = {"seconds": arguments.seconds, "rounds": arguments.rounds}
        if "local" in names:
            sets = "shard=" + ",".join(str((FOLDER / name).relative_to(REPOSITORY)) for name in SETS)
            run(["--sweep", sets, *LOCAL], Path(folder) / "local", **timing)
        if "bucket" in names:
            with bucket(FOLDER / "64-shards", Path(folder) / "log") as url:
                words = ["--manifest", url, "--global-batch-size", "256", "--sweep", *REMOTE]
                run(words, Path(folder) / "bucket", **timing)
        if arguments.write:
            for name in names:
                put(arguments.write, name, Path(folder) / name)


if __name__ == "__main__":
    main()
