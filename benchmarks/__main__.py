"""`python -m benchmarks [NAME ...]`: runs the named benchmarks, or all of them; each is also a module of its own."""

import argparse
import subprocess
import sys

BENCHMARKS = {
    "scale": "planning 10^5 to 10^7 samples: time, memory, objects (minutes)",
    "stream": "the stream against seven readers (an hour)",
    "pod": "what readers of a pod read and hold, by their number (minutes)",
    "index_rows": "what readers of tiny images read of indexes (minutes)",
    "chaos": "40 readers that are lost and come back (minutes)",
    "decoding": "what crops of JPEGs and small PNGs cost (seconds)",
    "damage": "the same damage to the stream and to webdataset (seconds)",
    "build": "shards from raw files, against other tools (an hour)",
}


def main() -> int:
    """Runs the benchmarks one after the other; stops at the first that fails."""
    listed = "\n".join(f"  {name:<10} {what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog=listed, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args().names or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        print(f"== {name}", flush=True)
        if code := subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
