"""How soon each verb says something on a terminal: seconds to its first character and to its end.

    python -m benchmarks.first_line SET RUN

Median of five runs, with stored bytecode and with PYTHONDONTWRITEBYTECODE=1 and none stored.
"""

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from benchmarks.measuring import parser_of

VERBS = {
    "build": "build --source shardset --input {set} --output {out} --dry-run",
    "verify": "verify {set} --deep",
    "inspect": "inspect {set}",
    "view": "view {out}.parquet --of {set} --per-class 1",
    "train": "train --manifest {set} --run-dir {out} --max-steps 1",
    "predict": "predict --from {run} nothing.jpg",
}
RUNS = 5


def seconds(words: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """The seconds to the first character of a command, and to its end."""
    ours, theirs = os.openpty()
    started, first = time.perf_counter(), 0.0
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, env=os.environ | environment)
    os.close(theirs)
    try:
        while os.read(ours, 4096):
            first = first or time.perf_counter() - started
    except OSError:  # how Linux says that nobody writes any more
        process.wait()
    return first, time.perf_counter() - started


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("set")
    parser.add_argument("run")
    options = vars(parser.parse_args())
    for name, line in VERBS.items():
        for cached in (True, False):
            runs = []
            for _ in range(RUNS):
                with tempfile.TemporaryDirectory() as place:
                    words = line.format(out=f"{place}/out", **options).split()
                    none = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": place}
                    command = [sys.executable, "-m", "shardset", *words]
                    runs.append(
                        seconds(command, {"PYTHONDONTWRITEBYTECODE": ""} if cached else none)
                    )
            first, end = map(median, zip(*runs, strict=True))
            kind = "bytecode" if cached else "none"
            print(f"{name:9} {kind:9} {first:5.2f} {end:6.2f}", flush=True)
