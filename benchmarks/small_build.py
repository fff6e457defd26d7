"""Processor time of complete processes: a build of 40 images, and the import of Beam alone.

    python -m benchmarks.small_build [--rounds 5] [--against CHECKOUT]

In turns; medians of user and system time, which other work on the machine changes least, and of
wall time.
"""

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.measuring import of_checkout, parser_of
from tests.conftest import REPOSITORY
from tests.makers.folders import write_class_folders

NUM_IMAGES = 40


def spent(words: list[str], checkout: Path) -> tuple[float, float]:
    """Seconds of processor time and of wall time of a process, with its children."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, *words]
    subprocess.run(command, env=of_checkout(checkout), capture_output=True, check=True)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def main() -> None:
    """Prints a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        raw, output = Path(place, "raw"), Path(place, "out")
        write_class_folders(raw, "ab", NUM_IMAGES // 2)
        build = f"-m pipelines build --source folder --input {raw} --output {output}".split()
        cases = {"build": (build, REPOSITORY), "import": (["-c", "import apache_beam"], REPOSITORY)}
        if options.against:
            cases["build of the other checkout"] = build, options.against
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, (words, checkout) in cases.items():
                shutil.rmtree(output, ignore_errors=True)
                runs[name].append(spent(words, checkout))
    print("| | processor time, s | wall time, s |\n|---|---|---|")
    for name, found in runs.items():
        cpu, wall = map(median, zip(*found, strict=True))
        print(f"| {name} | {cpu:.2f} | {wall:.2f} |")


if __name__ == "__main__":
    main()
