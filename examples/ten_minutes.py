"""From nothing to a prediction, timed: install, images, shards, training, prediction.

python -m examples.ten_minutes --folder ten-minutes
python -m examples.ten_minutes --skip-install --pictures photos

Needs nothing but Python: the first step creates an environment. Without --pictures it takes the
stamps of Tux Paint (`apt-get install tuxpaint-stamps-default`) if they are there, else the digits
that scikit-learn ships.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
STAMPS = Path("/usr/share/tuxpaint/stamps")
WRITE_DIGITS = (
    "import sys, pathlib; from examples.demo import write_digits;"
    " write_digits(pathlib.Path(sys.argv[1]))"
)


class StepFailed(Exception):
    """A step that did not work: which, how, and what to do."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the way, and the folder to run it in."""

    name: str
    command: list[str]
    place: Path


def steps(
    folder: Path, pictures: Path | None, *, skip_install: bool, epochs: int | None
) -> list[Step]:
    """What a user would type, up to the trained model.

    Without `pictures`, the digits are written first.
    """
    python = sys.executable if skip_install else str(folder / "venv" / "bin" / "python")
    extras = f"{REPOSITORY}[pipelines,trainer]"
    needed = [extras] if pictures else [extras, "scikit-learn>=1.5,<2"]
    install = [
        Step("create an environment", [sys.executable, "-m", "venv", "venv"], folder),
        Step("install", [python, "-m", "pip", "install", "--quiet", *needed], folder),
    ]
    digits = Step(
        "write the digits", [python, "-c", WRITE_DIGITS, str(folder / "pictures")], REPOSITORY
    )
    build = ["build", "--source", "folder", "--output", "shards", "--holdout", "test=0.1"]
    train = ["shardset", "train", "--manifest", "shards", "--run-dir", "run"]
    if epochs:
        train += ["--epochs", str(epochs)]
    return [
        *([] if skip_install else install),
        *([] if pictures else [digits]),
        Step(
            "build",
            [python, "-m", "shardset", *build, "--input", str(pictures or "pictures")],
            folder,
        ),
        Step("train", [python, "-m", *train], folder),
    ]


def predict(python: str, folder: Path, pictures: Path) -> Step:
    """The classes of one image of each of the first three class folders."""
    classes = sorted(path for path in pictures.iterdir() if path.is_dir())
    firsts = [
        next(iter(sorted(one.rglob("*.png")) + sorted(one.rglob("*.jp*g"))), None)
        for one in classes
    ]
    images = [str(path) for path in firsts if path][:3]
    if not images:
        raise StepFailed(
            f"{pictures}: no .png or .jpg in its class folders; expected CLASS/.../picture.png"
        )
    return Step("predict", [python, "-m", "shardset", "predict", "--from", "run", *images], folder)


def seconds_of(step: Step, environment: dict[str, str]) -> float:
    """Runs a step, whose output is shown, and returns how long it took. Raises StepFailed."""
    print(f"\n$ {shlex.join(step.command)}", flush=True)
    begin = time.monotonic()
    code = subprocess.run(step.command, cwd=step.place, env=environment).returncode
    if code:
        raise StepFailed(
            f"step {step.name!r} failed with exit code {code}; its own message is above"
        )
    return time.monotonic() - begin


def table(seconds: Sequence[tuple[str, float]]) -> str:
    """The seconds of each step and their sum."""
    total = sum(taken for _, taken in seconds)
    return "\n".join(f"{name:<24}{taken:>8.1f} s" for name, taken in [*seconds, ("all", total)])


def main(words: Sequence[str] | None = None) -> int:
    """Runs all steps and prints the table, also of those before a step that failed."""
    title, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m examples.ten_minutes", description=title, epilog=usage, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("ten-minutes"),
        help="new folder for everything it writes",
    )
    parser.add_argument(
        "--pictures", type=Path, help="class folders of pictures, which may be nested"
    )
    parser.add_argument(
        "--skip-install", action="store_true", help="use the environment that runs this"
    )
    parser.add_argument("--epochs", type=int, help="default: what the trainer chooses")
    args = parser.parse_args(words)
    folder: Path = args.folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        parser.error(
            f"--folder {folder} is not empty: what it holds would be resumed and not timed; name a"
            " new one"
        )
    if args.pictures and not args.pictures.is_dir():
        parser.error(
            f"--pictures {args.pictures} is no folder; expected CLASS/.../picture.png below it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    pictures = args.pictures.absolute() if args.pictures else STAMPS if STAMPS.is_dir() else None
    # Python's path would lead to this clone and past what was installed.
    environment = {
        name: value
        for name, value in os.environ.items()
        if args.skip_install or name != "PYTHONPATH"
    }
    taken: list[tuple[str, float]] = []
    try:
        before = steps(folder, pictures, skip_install=args.skip_install, epochs=args.epochs)
        for step in before:
            taken.append((step.name, seconds_of(step, environment)))
        last = predict(before[-1].command[0], folder, pictures or folder / "pictures")
        taken.append((last.name, seconds_of(last, environment)))
    except StepFailed as error:
        print(f"\n{table(taken)}\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{table(taken)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
